"""`python -m forerun`: the command line where the `forerun` script is not on the path."""

from forerun.cli.app import run

if __name__ == "__main__":
    run()
