"""mhc-ops hub: the package as a folder that Hugging Face's `kernels` loads."""

import argparse
import json
from pathlib import Path

from ..measure import files
from . import variants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write build/torch-cpu, -cuda and -rocm")


def run_hub(given: argparse.Namespace) -> int:
    """All variants, or none where one is there already or the disk is full."""
    written, build = variants(), given.folder / "build"
    with files.filled(build) as part:
        for variant, content in written.items():
            for path, text in content.items():
                place = part / variant / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
    for variant, content in written.items():
        print(f"{build / variant}: {json.loads(content['metadata.json'])['id']}")
    return 0
