"""`python -m lab COMMAND`; without a command, the list of them."""

import sys

from lab.runner import main

sys.exit(main())
