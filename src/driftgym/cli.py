"""The command line. Thin: each command checks its arguments, imports the room that does the work, and reports.

Exit codes: 0 when it did what it was asked, 1 when it failed, 2 on bad input, 130 when the user stopped it.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from driftgym import cli_sandbox
from driftgym.console import flush_in_time, print_in_time, print_table_in_time
from driftgym.errors import ConfigError, DriftgymError
from driftgym.sinks import any_sink_is_alive

_EXIT_FAILED, _EXIT_BAD_INPUT, _EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="driftgym",
    help="An agentic RL gym: agents play tool-calling episodes in sandboxes, and learn from them asynchronously.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
env_app = typer.Typer(help="Environments: list those registered, check one.", no_args_is_help=True)
app.add_typer(env_app, name="env")
app.add_typer(cli_sandbox.app, name="sandbox")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script: runs a command, and turns its errors into one line and an exit code.

    Args:
        arguments: the words after the program's name; None takes those that the process was called with. The process
            is then this program's own, and ends at once where a metric sink was given up, or nobody reads what it
            prints: an ordinary end would wait for them.
    """
    try:
        _run(arguments)
    except SystemExit as ending:
        is_flushed = arguments is not None or flush_in_time()
        if arguments is None and isinstance(ending.code, int | None) and (any_sink_is_alive() or not is_flushed):
            os._exit(ending.code or 0)
        raise


def _run(arguments: Sequence[str] | None) -> NoReturn:
    try:
        app(args=arguments)
    except ConfigError as error:
        _fail(error, _EXIT_BAD_INPUT)
    except DriftgymError as error:
        _fail(error, _EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    sys.exit(0)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Prints the version when asked; the commands do the rest."""
    if version:
        import driftgym

        typer.echo(f"driftgym {driftgym.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog="Example: driftgym train configs/quickstart.yaml sandbox.kind=docker trainer.max_steps=20")
def train(
    config: Annotated[Path | None, typer.Argument(help="A YAML file that describes the run.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to change, as key.path=value.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, exactly once.")] = None,
) -> None:
    """Train an agent as CONFIG says, or go on with a run that stopped.

    Ctrl-C once stops cleanly, with a checkpoint; twice stops at once.
    """
    if config is not None and resume is not None:
        raise ConfigError(
            f"train: --resume takes no CONFIG and no overrides (given: {config}); what is to change is changed in "
            f"{resume / 'config.resolved.yaml'}"
        )
    if config is None and resume is None:
        raise ConfigError("train: give either a CONFIG file or --resume RUN; see driftgym train --help")
    from driftgym.processes import collect_garbage_rarely
    from driftgym.trainer import run
    from driftgym.trainer.run_config import load_run_config
    from driftgym.trainer.stop import RunInterruptedError

    collect_garbage_rarely()
    try:
        if resume is not None:
            result = asyncio.run(run.resume(resume))
        else:
            assert config is not None
            result = asyncio.run(run.train(load_run_config(config, overrides or ())))
    except RunInterruptedError:
        typer.echo("stopped before the run began", err=True)
        sys.exit(_EXIT_INTERRUPTED)
    _print_result(result)


def _print_result(result: Any) -> None:
    from driftgym.trainer.summary import reward_windows

    windows = [
        (f"{first}-{last}", "-" if reward is None else f"{reward:.3f}")
        for first, last, reward in reward_windows(result.rows)
    ]
    if windows:
        print_table_in_time(("steps", "mean reward"), windows)
    print_in_time(f"run: {result.run_dir}")
    if result.is_interrupted:
        news = f"stopped after step {result.summary['steps']}; go on with: driftgym train --resume {result.run_dir}"
        print_in_time(news, to_stderr=True)
        sys.exit(_EXIT_INTERRUPTED)


@app.command(epilog="Example: driftgym serve runs/my-run/weights/1-40 --port 30000")
def serve(
    model: Annotated[Path, typer.Argument(help="A folder that transformers can load.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 30000,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 128,
    max_context_tokens: Annotated[int, typer.Option(min=2, help="Prompt and answer together.")] = 1024,
    num_threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    weight_version: Annotated[str, typer.Option(help="INCARNATION:VERSION of the weights.")] = "1:0",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Serve MODEL with the embedded generator, over the part of SGLang's protocol that driftgym uses."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{model}: not a model's folder (config.json is missing); give one that transformers can load"
        )
    from driftgym.agents.generators.embedded.server import serve as run_server

    run_server(
        str(model),
        host=host,
        port=port,
        max_batch_size=max_batch_size,
        max_context_tokens=max_context_tokens,
        num_threads=num_threads,
        weight_version=weight_version,
        device=device,
        dtype=dtype,
    )


@env_app.command("list", epilog="Example: driftgym env list")
def env_list() -> None:
    """List the environments that a run can play."""
    from driftgym.envs.registry import list_envs

    for env_id in list_envs():
        typer.echo(env_id)


@env_app.command("check", epilog="Example: driftgym env check driftgym/Lookup-v0 level=two_calls")
def env_check(
    env_id: Annotated[str, typer.Argument(help="A Gymnasium id; see driftgym env list.")],
    kwargs: Annotated[list[str] | None, typer.Argument(help="Its constructor's arguments, as key=value.")] = None,
) -> None:
    """Check that an environment keeps the contract: seeds, schemas, grading, closing, no leaks between episodes."""
    from driftgym.config import parse_overrides
    from driftgym.envs.check import check_tool_env

    findings = check_tool_env(env_id, kwargs=parse_overrides(kwargs or ()))
    for finding in findings:
        typer.echo(finding)
    if findings:
        raise DriftgymError(f"{env_id}: {len(findings)} findings")
    typer.echo(f"{env_id}: sound")


def _fail(error: Exception, code: int) -> NoReturn:
    """One line to standard error: the first line of the message, and the last where it has several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ({lines[-1]})"
    print_in_time(f"driftgym: {text}", to_stderr=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
