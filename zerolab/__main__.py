"""`python -m zerolab` is the command `zerolab`; torchrun starts it this way."""

import sys

from zerolab.cli import main

sys.exit(main())
