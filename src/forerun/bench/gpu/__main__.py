"""`python -m forerun.bench.gpu`; a user's error is one line and exit code 2."""

import sys

from forerun.bench.gpu.command import main
from forerun.errors import ForerunError

try:
    main()
except ForerunError as error:
    print(f"forerun: {error}", file=sys.stderr)
    sys.exit(2)
