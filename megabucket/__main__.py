"""``python -m megabucket``: the same as the ``megabucket`` command."""

from megabucket.cli.main import app

if __name__ == "__main__":
    app(prog_name="megabucket")
