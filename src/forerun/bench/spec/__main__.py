"""`python -m forerun.bench.spec`; a user's error is one line and exit code 2."""

import sys

from forerun.bench.spec.command import main

if __name__ == "__main__":
    sys.exit(main())
