"""Options for runs on several hosts. In a file of their own, because parsing options must not import jax."""

import dataclasses

from nagjax.ranges import Count, Natural, check_fields


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """This process's place among those of the run; fields that are None come from the environment (`hosts.find`)."""

    coordinator: str | None = None  # ADDRESS:PORT of process 0; by default from COORDINATOR_ADDRESS
    count: Count | None = None  # number of processes; by default from NUM_PROCESSES; 1: one process in any environment
    index: Natural | None = None  # number of this process, from 0; by default from PROCESS_ID or JOB_COMPLETION_INDEX
    timeout: Natural = 300  # seconds to wait for the other processes at the start

    def __post_init__(self):
        check_fields(self, "hosts.")
