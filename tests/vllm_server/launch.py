"""Runs vLLM's server with the flags that it is given. It ends with its standard input: it outlives no test."""

import os
import runpy
import signal
import threading


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # its engine is a process of the same group


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
