"""python -m moed.eval: evaluations of checkpoint folders, each by a moed of its own or by one that runs."""
from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any, List, NoReturn, Optional, Sequence

_EXAMPLES = """\
examples:
  python -m moed.eval /models/mixtral-gptq --text wiki.txt --window 2048 --moed bin/moed
  python -m moed.eval /models/mixtral-gptq --text wiki.txt --address unix:/run/moed.sock --reference /models/mixtral-bf16
  python -m moed.eval ../shared/models/*/ --text ../shared/models/eval.txt --start 8192 --wire bf16 --moed bin/moed

exit code: 0 every evaluation is within its bound, 1 one is not, 2 usage or set-up"""


class _Parser(argparse.ArgumentParser):
    """Says first what is wrong, like moed's other programs."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"moed.eval: {message}\n  python -m moed.eval --help describes the options\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m moed.eval", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EXAMPLES, allow_abbrev=False,
        description="Perplexity of a checkpoint through the service, beside that of the same model in process.")
    parser.add_argument("paths", metavar="PATH", nargs="+", type=pathlib.Path,
                        help="checkpoint folder; without a tokenizer in it, its tokens are bytes")
    parser.add_argument("--text", metavar="FILE", type=pathlib.Path, required=True, help="what is scored")
    parser.add_argument("--start", metavar="BYTE", type=int, default=0, help="where in FILE the first window begins (0)")
    parser.add_argument("--window", metavar="TOKENS", type=int, default=256, help="of a window, scored on its own (256)")
    parser.add_argument("--address", metavar="A",
                        help="a server that runs and has the checkpoint; else one is started for each PATH")
    parser.add_argument("--model", metavar="NAME", default="", help="its name there, where A has several")
    parser.add_argument("--moed", metavar="BIN", default="moed", help="the program, to start and to dequantize (moed on PATH)")
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), default="f32", help="of the model around the experts (f32)")
    parser.add_argument("--wire", choices=("f32", "bf16", "f16"), help="of hidden states on their way (as --dtype)")
    parser.add_argument("--router", choices=("model", "server"), default="model", help="which one routes (model)")
    parser.add_argument("--shared", choices=("server", "model"), default="server", help="where shared experts run (server)")
    parser.add_argument("--reference", metavar="R", default="dequantize",
                        help="dequantize (the default): this checkpoint's weights by BIN, activations quantized as the scheme "
                        "says; none; or the path of an unquantized checkpoint")
    parser.add_argument("--bound", metavar="PERCENT", type=float,
                        help="how far perplexities may be apart (0.1; 0.5 with quantized activations)")
    parser.add_argument("--json", metavar="FILE", help="the numbers; - for stdout, which then has nothing else")
    return parser


def _open_files(arguments: argparse.Namespace) -> bytes:
    """The text, after it was seen that --json can be written: before anything is computed. OSError that names the option."""
    option = "--text"
    try:
        text: bytes = arguments.text.read_bytes()
        option = "--json"
        if arguments.json not in (None, "-"):
            open(arguments.json, "a", encoding="utf-8").close()
    except OSError as error:
        raise OSError(f"{option}: wanted a file, got {error}") from None
    return text


def _evaluate(arguments: argparse.Namespace, path: pathlib.Path, address: str, text: bytes) -> Any:
    import moed
    from moed.eval.evaluate import evaluate

    with moed.Client(address, retries=3) as client:
        return evaluate(path, client, text, program=arguments.moed, start=arguments.start,
                        window=arguments.window, model_name=arguments.model,
                        dtype=arguments.dtype, wire=arguments.wire, router=arguments.router, shared=arguments.shared,
                        reference=arguments.reference, bound=arguments.bound)


def _run(arguments: argparse.Namespace) -> List[Any]:
    from moed.eval._server import Server

    rows, text = [], _open_files(arguments)
    for path in arguments.paths:
        if arguments.address is not None:
            rows.append(_evaluate(arguments, path, arguments.address, text))
            continue
        with Server(arguments.moed, path) as address:
            rows.append(_evaluate(arguments, path, address, text))
    return rows


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.address is not None and len(arguments.paths) > 1:
        parser.error(f"--address: wanted one PATH, got {len(arguments.paths)}")
    try:
        import transformers
        from moed import Error
        from moed.eval._tables import table
    except ImportError as error:
        print(f"moed.eval: {error}", file=sys.stderr)
        return 2
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        rows = _run(arguments)
    except (Error, OSError, ValueError) as error:
        print(f"moed.eval: {error}", file=sys.stderr)
        return 2
    passed = all(row.passed for row in rows)
    document = json.dumps({"text": str(arguments.text), "start": arguments.start, "window": arguments.window,
                           "rows": [dataclasses.asdict(row) for row in rows], "passed": passed}, indent=1)
    if arguments.json not in (None, "-"):
        pathlib.Path(arguments.json).write_text(document + "\n")
    print(document if arguments.json == "-" else table(rows))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
