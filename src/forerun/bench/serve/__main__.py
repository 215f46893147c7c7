"""`python -m forerun.bench.serve`."""

import sys

from forerun.bench.serve.command import main

sys.exit(main())
