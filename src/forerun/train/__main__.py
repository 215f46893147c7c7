"""`python -m forerun.train`: see forerun.train.commands."""

import sys

from forerun.train.commands import main

sys.exit(main())
