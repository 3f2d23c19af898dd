"""mhc-ops hub: the package as a folder that Hugging Face's `kernels` loads."""

import argparse
import json
from pathlib import Path

from ..measure import files
from . import VARIANTS, folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="where to write build/, torch-ext/, build.toml and CARD.md"
    )


def run_hub(given: argparse.Namespace) -> int:
    """Write all files, or none if one of them is there already or the disk is full."""
    written = folder()
    with files.filled(given.folder) as part:
        for path, text in written.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_text(text, encoding="utf-8")
    for name in (f"build/torch-{backend}" for backend in VARIANTS):
        print(f"{given.folder / name}: {json.loads(written[f'{name}/metadata.json'])['id']}")
    return 0
