"""The program in processes that wait 5 s for each other, of which rank LATE of the environment never joins."""

import os
import time

from ppo_repro.base import peers

peers.JOINING = 5.0

from ppo_repro.base import ranks  # noqa: E402  # takes the number
from ppo_repro.commands import cli  # noqa: E402

if __name__ == "__main__":
    assert ranks.JOINING == peers.JOINING
    if os.environ["RANK"] == os.environ["LATE"]:
        time.sleep(600.0)
    cli.main()
