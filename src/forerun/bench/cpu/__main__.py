"""`python -m forerun.bench.cpu`."""

import sys

from forerun.bench.cpu.command import main

sys.exit(main())
