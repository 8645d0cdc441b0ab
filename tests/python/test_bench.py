"""moed.bench: what it prints and writes about a real moed, and what it refuses. No test looks at how fast anything is."""
import contextlib
import io
import json
import pathlib
import unittest

import moed
from moed import _bench_floor, _bench_picture, bench
from support import DEEPSEEK, Server, ServerCase, temporary_folder

MOECTL = "client/moectl"


def run(*arguments):
    """Exit code, standard output and standard error of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = bench.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


class Layers(unittest.TestCase):
    def test_layers_are_numbers_and_ranges_of_those_that_there_are(self):
        self.assertEqual(bench.parse_layers("3,5-7,1", range(10)), [3, 5, 6, 7, 1])
        for text, why in (("", "numbers and ranges"), ("a", "numbers"), ("1-", "numbers"), ("-1", "numbers"), ("1-2-3", "numbers"),
                          ("12", "got 12"), ("3-2", "not empty"), ("0-999999999", "got 10")):
            with self.assertRaisesRegex(moed.InvalidArgument, f"--layers: wanted .*{why}"):
                bench.parse_layers(text, range(10))


class Decode(ServerCase):
    def test_the_table_has_every_layer_and_the_json_its_parts(self):
        for transport, dtype, way in (("auto", "bf16", "ring"), ("rpc", "f32", "rpc"), ("shared-memory", "f16", "shared-memory")):
            path = f"{temporary_folder(self)}/report.json"
            code, out, err = run(self.server.unix, "--rows", 3, "--steps", 4, "--transport", transport, "--dtype", dtype, "--json",
                                 path)
            self.assertEqual((code, err), (0, ""))
            self.assertRegex(out, rf"{DEEPSEEK}, H = 256, 3 rows of {dtype}, 4 steps: .* tokens/s")
            self.assertRegex(out, rf"\n    1  cpu_.*{way} .*\n    2  cpu_.*{way} ")
            report = json.loads(pathlib.Path(path).read_text())
            self.assertEqual(([row["layer"] for row in report["rows"]], report["steps"], report["tokens"]), ([1, 2], 4, 3))
            self.assertAlmostEqual(report["tokens_per_s"], 12 / report["seconds"])
            for row in report["rows"]:
                parts = [row[part] for part in ("client_us", "transport_us", "queue_us", "compute_us")]
                self.assertTrue(all(part >= 0 for part in parts) and row["client_us"] > 0 and row["compute_us"] > 0)
            counted = 4 * sum(row[part] for row in report["rows"] for part in bench._PARTS) / 1e6
            self.assertLess(counted, report["seconds"] * 1.001)

    def test_json_on_the_standard_output_is_alone_there(self):
        code, out, err = run(self.server.unix, "--steps", 1, "--layers", "2", "--json", "-")
        self.assertEqual((code, [row["layer"] for row in json.loads(out)["rows"]]), (0, [2]))
        self.assertIn("tokens/s", err)

    def test_what_makes_no_sense_is_refused_before_anything_is_sent(self):
        for arguments, text in ((("--rows", 0), "--rows: wanted 1 or more"), (("--steps", -1), "--steps"), (("--frob",), "--frob"),
                                (("--layers", "9"), "--layers"), (("--model", "frob"), "--model"),
                                (("--moectl", MOECTL), "--floor with it"), (("--transport", "pigeon"), "pigeon"),
                                (("--token-file", "/no/such"), "/no/such")):
            code, out, err = run(self.server.unix, *arguments)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(text, err)
        self.assertEqual(run("127.0.0.1:1", "--floor")[0], 2)
        self.assertEqual(run("unix:/tmp/no-such-moed")[0], 2)

    @unittest.skipIf(_bench_picture.available(), "the package matplotlib is installed")
    def test_a_picture_without_matplotlib_is_refused_at_the_start(self):
        code, out, err = run("unix:/tmp/no-such-moed", "--png", "/tmp/layers.png")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("--png: wanted the package matplotlib", err)

    @unittest.skipUnless(_bench_picture.available(), "the package matplotlib is not installed")
    def test_the_picture_is_a_png(self):
        path = pathlib.Path(temporary_folder(self), "layers.png")
        self.assertEqual(run(self.server.unix, "--steps", 2, "--png", path)[0], 0)
        self.assertEqual(path.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")


class Floor(unittest.TestCase):
    def setUp(self):
        kept = _bench_floor._SECONDS, _bench_floor._BURSTS, _bench_floor._BURST_SECONDS
        _bench_floor._SECONDS, _bench_floor._BURSTS, _bench_floor._BURST_SECONDS = 0.2, 2, 0.02
        self.addCleanup(lambda: setattr(_bench_floor, "_SECONDS", kept[0]) or setattr(_bench_floor, "_BURSTS", kept[1]) or
                        setattr(_bench_floor, "_BURST_SECONDS", kept[2]))

    def test_the_floor_has_the_echo_and_with_moectl_the_cpp_client_beside_this_one(self):
        server = Server("--bench-layer", "512", models=())
        self.addCleanup(server.close)
        for more, bare in (((), ["grpcio echo"]), (("--moectl", MOECTL), ["grpcio echo", "C++ client", "C++ client"])):
            path = f"{temporary_folder(self)}/report.json"
            code, out, err = run(server.unix, "--steps", 3, "--floor", "--json", path, *more)
            rows = json.loads(pathlib.Path(path).read_text())["floor"]
            self.assertEqual(([row["bare"] for row in rows], err), (bare, ""))
            self.assertEqual(code, 0 if all(row["passed"] for row in rows) else 1)
            self.assertEqual(rows[-1]["bytes"], 1024 if not more else 3_670_016)
            self.assertTrue(all(row["p50_us"] > 0 and row["bare_us"] > 0 for row in rows))
            self.assertIn("grpcio echo", out)
        code, _, err = run(server.unix, "--steps", 1, "--floor", "--moectl", "/bin/false")
        self.assertEqual(code, 2)
        self.assertIn("/bin/false: exit code 1", err)
