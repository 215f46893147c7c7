"""`python -m forerun.cli`: the command line where the `forerun` script is not on the path."""

from forerun.cli.app import main

if __name__ == "__main__":
    main()
