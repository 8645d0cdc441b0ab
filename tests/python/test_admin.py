"""Changes of what a real moed serves, through its admin socket."""
import pathlib
import unittest

import moed
from support import DATA, DEEPSEEK, Golden, Server, max_relative, temporary_folder

OTHER = "gptq-int4-g32-sym"
TOKEN = "a-token-of-an-admin"


class Changes(unittest.TestCase):
    def setUp(self):
        folder = temporary_folder(self)
        pathlib.Path(folder, "tokens").write_text(TOKEN + "\n")
        self.admin_address = f"unix:{folder}/admin"
        self.server = Server("--admin-listen", self.admin_address, "--admin-token-file", f"{folder}/tokens")
        self.addCleanup(self.server.close)
        self.admin = moed.Admin(self.admin_address, token=TOKEN)
        self.addCleanup(self.admin.close)
        self.client = moed.Client(self.server.unix)
        self.addCleanup(self.client.close)

    def names(self, status):
        return sorted(model.name for model in status.models)

    def test_a_model_is_loaded_swapped_rolled_back_and_unloaded(self):
        g, path = Golden(OTHER, 0), str((DATA / OTHER).resolve())
        self.assertEqual(self.names(self.admin.load("more", path)), [DEEPSEEK, "more"])
        more = self.client.forward(0, g.x, g.ids, g.weights, model="more")
        self.assertLess(max_relative(more.output, g.y), 0.01)
        with self.assertRaisesRegex(moed.AlreadyExists, "more"):
            self.admin.load("more", path)

        before = self.client.forward(1, Golden().x, model=DEEPSEEK)
        swapped = self.admin.swap(DEEPSEEK, path, keep_previous=True)
        self.assertEqual({model.name: model.path for model in swapped.models}[DEEPSEEK], path)
        result = self.client.forward(0, g.x, g.ids, g.weights, model=DEEPSEEK)
        self.assertEqual(result.output.tobytes(), more.output.tobytes())
        self.assertGreater(result.generation, before.generation)
        self.admin.rollback(DEEPSEEK)
        again = self.client.forward(1, Golden().x, model=DEEPSEEK)
        self.assertEqual(again.output.tobytes(), before.output.tobytes())

        self.assertEqual(self.names(self.admin.unload("more")), [DEEPSEEK])
        with self.assertRaises(moed.NotFound):
            self.client.forward(0, g.x, model="more")

    def test_a_change_that_cannot_be_made_changes_nothing(self):
        with self.assertRaisesRegex(moed.Error, "frob"):
            self.admin.swap("", "/frob")
        with self.assertRaises(moed.NotFound):
            self.admin.unload("frob")
        with self.assertRaises(moed.FailedPrecondition):
            self.admin.rollback()  # of no swap
        for wrong in (lambda: self.admin.load(5, "/frob"), lambda: self.admin.load("a", None, timeout=-1)):
            with self.assertRaises(moed.InvalidArgument):
                wrong()
        self.assertEqual(self.names(self.client.status()), [DEEPSEEK])
        self.client.forward(1, Golden().x)

    def test_who_is_no_admin_is_refused(self):
        for token in (None, "another-token-of-a-test"):
            with moed.Admin(self.admin_address, token=token) as admin:
                with self.assertRaises(moed.Unauthenticated):
                    admin.unload(DEEPSEEK)
        self.client.forward(1, Golden().x)
        self.admin.close()
        with self.assertRaises(moed.FailedPrecondition):
            self.admin.rollback()

    def test_a_server_without_the_service_says_so(self):
        server = Server()
        self.addCleanup(server.close)
        with moed.Admin(server.unix) as admin:
            with self.assertRaises(moed.Unimplemented):
                admin.unload(DEEPSEEK)
