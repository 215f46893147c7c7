"""`python -m forerun.bench.moe`; a user's error is one line and exit code 2."""

import sys

from forerun.bench.moe.command import main
from forerun.errors import ForerunError

try:
    sys.exit(main())
except ForerunError as error:
    print(f"forerun: {error}", file=sys.stderr)
    sys.exit(2)
