"""The end of an engine whose promised KV is lost: on all ranks at the same call, and in words.

TensorRT-LLM counts what it was offered as computed, and its interface has no word for a load that
failed. A request whose KV cannot be brought must neither run, on whatever lies in its pages, nor
wait for ever. What is left is what the runtime's own connectors do (Mooncake Store raises where a
load falls short): an exception out of a hook, which ends the executor's loop and with it the
requests.

Ranks meet in a collective after every ``get_finished``; one that raised alone would leave the
others waiting there. So the rank that gives up says in a file of the job's private directory at
which call all of them raise: it is written before that collective, and the call meant is the second
one after it.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Final

from tierkv.errors import TierKVError

__all__ = ["Ending", "LostLoadError"]

_log = logging.getLogger("tierkv.trtllm")
_FILE: Final = "lost.json"
_AHEAD: Final = 2


class LostLoadError(TierKVError):
    """KV that was verified, held and offered is gone, and no tier has another copy.

    Raised out of ``get_finished`` on every rank, once ``serving.lost_after`` has passed. The engine
    ends; what is in the tiers stays, but for the lost block.
    """


class Ending:
    """Decides at which call of ``get_finished`` a rank raises.

    Args:
        rank: Which rank this is.
        world: Of how many.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._alone = world == 1
        self._calls = 0
        self._at: int | None = None
        self._why = ""

    def call(self, lost: str | None, directory: str | None) -> str | None:
        """Note one call of ``get_finished``.

        Every rank makes the same calls, so that their numbers mean the same everywhere. With
        several ranks it looks for the file once a call (3 us).

        Args:
            lost: What this rank has lost, in words; None: nothing.
            directory: Where the ranks meet; None: that is not known yet.

        Returns:
            Why to raise now; None: do not.
        """
        self._calls += 1
        if self._at is None and lost is not None:
            self._at, self._why = self._calls if self._alone else self._calls + _AHEAD, lost
            if not self._alone and directory is not None:
                self._tell(directory)
        if self._at is None and not self._alone and directory is not None:
            self._look(directory)
        return self._why if self._at is not None and self._calls >= self._at else None

    def _tell(self, directory: str) -> None:
        """Write the file, whole or not at all; who was first is followed."""
        path = os.path.join(directory, _FILE)
        mine = f"{path}.{self._rank}"
        try:
            handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w") as stream:
                json.dump({"call": self._at, "why": self._why}, stream)
            os.link(mine, path)
        except FileExistsError:
            self._look(directory)
        except OSError as error:
            _log.error("tierkv: the other ranks cannot be told that a load is lost: %s", error)

    def _look(self, directory: str) -> None:
        try:
            with open(os.path.join(directory, _FILE)) as stream:
                told = json.load(stream)
            self._at, self._why = int(told["call"]), str(told["why"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("tierkv: what another rank lost cannot be read: %s", error)
