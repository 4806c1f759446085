"""Run something in a forked child that may kill itself."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def run_forked(act: Callable[[], object]) -> int:
    """Call ``act`` in a child and return how the child ended: 0, 1 after an exception, or minus a signal's number.

    For programs that have started no threads yet, such as those of this package.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:  # the child must never return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
