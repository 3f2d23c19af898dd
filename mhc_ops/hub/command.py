"""mhc-ops hub: the package as a folder that Hugging Face's `kernels` loads."""

import argparse
import json
from pathlib import Path

from ..measure.report import Refused
from . import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write build/torch-cpu, -cuda and -rocm")


def run_hub(given: argparse.Namespace) -> int:
    try:
        written = write(given.folder)
    except FileExistsError as error:
        raise Refused((error.strerror and f"{error.filename}: {error.strerror}") or str(error)) from error
    except OSError as error:
        raise Refused(f"{given.folder}: {error.strerror}") from error
    for variant in written:
        print(f"{variant}: {json.loads((variant / 'metadata.json').read_text())['id']}")
    return 0
