"""What a server tells about itself: values, and the tables that people see."""
import unittest

import moed
from moed import reports
from support import ServerCase

NAME = "ct-w4a16-g32-sym"


class Reports(ServerCase):
    def setUp(self):
        self.client = moed.Client(self.server.unix)
        self.addCleanup(self.client.close)

    def test_hello_tells_models_and_what_is_offered(self):
        hello = self.client.hello()
        model = hello.models[0]
        self.assertEqual((model.name, model.hidden, model.num_experts, model.top_k, model.layers), (NAME, 256, 16, 4, [1, 2]))
        self.assertEqual((hello.protocol, hello.hidden_dtypes[:3], hello.max_message_bytes), (1, ["f32", "bf16", "f16"], 256 << 20))
        self.assertEqual((len(hello.shared_memory.server_id), hello.shared_memory.version), (16, 1))
        self.assertRegex(repr(hello), rf"moed 0.1.0, protocol 1.*\n  model .*\n  {NAME}  256  16  4  1-2     0:16 ")

    def test_status_tells_layers_host_and_queue(self):
        status = self.client.status(NAME)
        self.assertEqual([(layer.layer, layer.state) for layer in status.models[0].layers], [(1, "ready"), (2, "ready")])
        self.assertEqual((status.host.threads, status.queue.waiting), (1, 0))
        self.assertIn("int4", repr(status))

    def test_explain_tells_every_backend_and_why_not(self):
        explanation = self.client.explain(layer=2)
        self.assertEqual(([layer.layer for layer in explanation.layers], explanation.fits), ([2], True))
        layer = explanation.layers[0]
        verdicts = {one.name: one for one in layer.backends}
        self.assertTrue(verdicts[layer.choice].ok)
        self.assertFalse(verdicts["reference"].ok)
        self.assertTrue(all(one.reasons[0].code and one.reasons[0].text for one in layer.backends if not one.ok))
        self.assertIn("chosen", repr(explanation))
        self.assertEqual(len(self.client.explain().layers), 2)

    def test_self_check_and_health(self):
        check = self.client.self_check(layer=1, tokens=3, seed=7)
        self.assertEqual([(row.layer, row.tokens, row.passed) for row in check.rows], [(1, 3, True)])
        self.assertIn("self-check passed", repr(check))
        self.assertTrue(all(self.client.health(name).serving for name in ("", NAME, f"{NAME}/1")))
        self.assertEqual(self.client.health("frob").status, "SERVICE_UNKNOWN")

    def test_notebooks_get_tables_in_which_nothing_is_markup(self):
        client = self.client
        for report in (client.hello(), client.status(), client.explain(), client.self_check(), client.health()):
            self.assertRegex(report._repr_html_(), "^<p>")
        check = reports.SelfCheck([reports.SelfCheckRow(1, "<script>", "a&b", 1, 0.0, 0.0, False)], False)
        self.assertIn("<td>&lt;script&gt;</td><td>a&amp;b</td>", check._repr_html_())
        self.assertIn("NO", repr(check))


class Texts(unittest.TestCase):
    def test_numbers_are_shown_as_ranges_and_sizes(self):
        self.assertEqual(reports._ranges([0, 1, 2, 5, 7, 8]), "0-2,5,7-8")
        self.assertEqual(reports._ranges([]), "")
        self.assertEqual([reports._size(count) for count in (0, 1023, 1536, 3 << 20, 5 << 40)],
                         ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 TiB"])
