"""Entry point of the ``kvpush`` command: declares the commands, imports nothing heavy."""

import typer

from kvpush.cli.bench import bench
from kvpush.cli.demo import demo
from kvpush.cli.doctor import doctor
from kvpush.cli.router import router

app = typer.Typer(
    name="kvpush",
    help="KV cache push transfer for disaggregated LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvpush.doctor.versions import version_of

        typer.echo(f"kvpush {version_of('kvpush') or 'unknown (not installed as a distribution)'}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """KV cache push transfer for disaggregated LLM serving."""


app.command()(doctor)
app.command()(demo)
app.command()(router)
app.add_typer(bench)
