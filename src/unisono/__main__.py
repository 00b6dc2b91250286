"""`python -m unisono` is the `unisono` command."""

import sys

from unisono.cli import main

sys.exit(main())
