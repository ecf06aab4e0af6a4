"""The ``kvpush`` command."""
