"""`python -m unweight_ext`: the same as `unweight`."""

import sys

from .cli import main

sys.exit(main())
