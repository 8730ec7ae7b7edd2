"""The command that runs a module of this installation in a process of its own."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """``python -m MODULE ARGUMENTS``, with modules from where this process has them: ``-m`` looks into the current
    folder first, which may be a checkpoint's, and no code of a checkpoint is run."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import runpy; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return (sys.executable, "-c", code, *arguments)
