"""Builds the package: its modules, and the descriptors of the wire contract's messages, which generate.sh writes."""
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = ("moe/v1/moe.proto", "google/rpc/status.proto", "google/rpc/error_details.proto", "grpc/health/v1/health.proto")


def generate(out: pathlib.Path) -> None:
    subprocess.run([str(HERE / "generate.sh"), str(out)], check=True, env={**os.environ, "PYTHON": sys.executable})


class BuildWithMessages(build_py):
    def run(self) -> None:
        super().run()
        # An editable installation imports the modules from the checkout, so the descriptors have to lie there.
        editable = getattr(self, "editable_mode", False)
        generate((HERE if editable else pathlib.Path(self.build_lib).resolve()) / "moed" / "messages.binpb")


class SourcesWithProtos(sdist):
    def make_release_tree(self, base_dir: str, files: list) -> None:
        super().make_release_tree(base_dir, files)
        shutil.copy2(HERE / "generate.sh", base_dir)
        source = HERE / "proto" if (HERE / "proto").is_dir() else HERE.parent.parent / "proto"
        for name in PROTOS:
            target = pathlib.Path(base_dir) / "proto" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target)


setup(cmdclass={"build_py": BuildWithMessages, "sdist": SourcesWithProtos})
