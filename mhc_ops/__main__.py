"""python -m mhc_ops: the same as mhc-ops."""

import sys

from .cli import main

sys.exit(main())
