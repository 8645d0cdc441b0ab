"""How a text becomes windows of tokens."""
import pathlib
import tempfile
import unittest

import tokenizers
import transformers

import moed
from moed.eval._score import read_windows


class Windows(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_are_bytes_where_there_is_no_tokenizer(self):
        self.assertEqual(read_windows(self.folder, b"xxabcde", 2, 2, 256).tolist(), [[97, 98], [99, 100]])

    def test_have_the_tokens_of_the_folder_and_no_special_ones(self):
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 5, "b": 7, "<s>": 9}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 9)])
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", bos_token="<s>").save_pretrained(self.folder)
        self.assertEqual(read_windows(self.folder, b"xx a b b c a", 2, 2, 1000).tolist(), [[5, 7], [7, 0]])

    def test_are_not_guessed(self):
        with self.assertRaisesRegex(moed.InvalidArgument, "wanted a tokenizer .* for 1000 tokens, got none"):
            read_windows(self.folder, b"abcd", 0, 2, 1000)
