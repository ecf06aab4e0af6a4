"""``python -m kvpush``: the same as the ``kvpush`` command."""

from kvpush.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvpush")
