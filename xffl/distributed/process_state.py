"""The part of the state that says where the process runs: world, node and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from xffl.distributed import checks
from xffl.distributed.fields import StateFields
from xffl.errors import StateError

__all__ = ["ProcessState"]


@dataclass
class ProcessState(StateFields):
    """The setters of what does not depend on how the model is spread."""

    def set_global(
        self,
        backend: dist.Backend | str,
        device_type: torch.device | str,
        master_addr: str | None,
        master_port: int | None,
        rank: int,
        world_size: int,
    ) -> None:
        """Set global process group information.

        Collective over the world, where it is initialized.

        :param backend: Communication backend to use, which this build of torch has.
        :param device_type: Type of device to use, ``cpu`` or ``cuda``.
        :param master_addr: Address of the master node for the rendez-vous; empty where ranks meet otherwise.
        :param master_port: Port of the master node for the rendez-vous; 0 where ranks meet otherwise.
        :param rank: Global process rank, ``0 <= rank < world_size``.
        :param world_size: Global world size, at least 1.
        :raises ConfigError: if backend, device or rendez-vous cannot be meant.
        :raises TopologyError: if the rank is outside the world, or torch.distributed or the node says otherwise.
        :raises StateError: if a set-up stands on what was said before.
        """

        def check() -> tuple[dist.Backend, torch.device, tuple[str | None, int | None], tuple[int, int]]:
            if self._layers:
                raise StateError(f"set_global comes before {self._layers[-1].call}; undo that first")
            place = checks.check_place("rank", rank, "world_size", world_size)
            checks.check_world(place)
            node = (self.node_local_rank, self.node_local_size, self.node_rank, self.node_world_size)
            checks.check_node(node, place[1])
            device = checks.check_device("device_type", device_type)
            meeting = checks.check_rendezvous(master_addr, master_port)
            return checks.check_backend(backend), torch.device(device.type), meeting, place

        backend_, device, meeting, place = self._agreed(
            "arguments of set_global", check, lambda it: f"{it[0]}, {it[1]}, {it[2]}, {it[3][1]} ranks"
        )
        self.backend, self.device_type = backend_, device
        self.master_addr, self.master_port = meeting
        self.rank, self.world_size = place

    def set_node(self, node_local_rank: int, node_local_size: int, node_rank: int, node_world_size: int) -> None:
        """Set the process' information relative to the local node. Nodes may hold different numbers of processes.

        Collective over the world, where it is initialized.

        :param node_local_rank: Local compute node rank, ``0 <= node_local_rank < node_local_size``.
        :param node_local_size: World size of the local compute node.
        :param node_rank: Rank of the local compute node among all the available nodes in the training.
        :param node_world_size: Number of compute nodes involved in the training process.
        :raises TopologyError: if a rank is outside its size, or the nodes do not fit the world.
        """

        def check() -> tuple[int, int, int, int]:
            local = checks.check_place("node_local_rank", node_local_rank, "node_local_size", node_local_size)
            node = checks.check_place("node_rank", node_rank, "node_world_size", node_world_size)
            checks.check_node((*local, *node), self.world_size)
            return (*local, *node)

        found = self._agreed("arguments of set_node", check, lambda it: f"{it[3]} nodes")
        self.node_local_rank, self.node_local_size, self.node_rank, self.node_world_size = found

    def set_exec_device(self, current_device: torch.device | int, streams: int | None = None) -> None:
        """Set the device that this process works on, and make it torch's current one.

        Collective over the world, where it is initialized.

        :param current_device: Training device; a number is the index of a GPU.
        :param streams: Number of CUDA streams to instantiate; None means 4 on CUDA and none on CPU.
        :raises ConfigError: if there is no such device, it is not of the state's type, or CPU is to have streams.
        :raises StateError: if groups were made for another number of streams.
        """

        def check() -> tuple[torch.device, int | None]:
            kind = None if self.device_type is None else self.device_type.type
            device = checks.check_device("current_device", current_device, kind)
            if device == torch.device("cuda"):  # without an index
                device = torch.device("cuda", torch.cuda.current_device())
            count = checks.check_streams(streams, device)
            if self._layers and (count or 1) != self._handles():
                raise StateError(
                    f"{count} streams were asked for, but {self._layers[-1].call} made groups for {self._handles()}; "
                    "call set_exec_device before it"
                )
            return device, count

        device, count = self._agreed("arguments of set_exec_device", check, lambda it: f"{it[0].type}, streams={it[1]}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.current_device = device
        new = (torch.cuda.Stream(device) for _ in range(count or 0))  # type: ignore[no-untyped-call]
        self.streams = None if count is None else tuple(new)

    def set_init_device(self, init_device: torch.device | None, meta_initialization: bool = False) -> None:
        """Set the device that models are initialized on.

        Collective over the world, where it is initialized.

        :param init_device: Initialization device; ranks may differ. None means the meta device where meta
            initialization is asked for, else the device that the process works on.
        :param meta_initialization: If meta device initialization is required.
        :raises ConfigError: if the device does not exist, or is the meta device without meta initialization.
        """

        def check() -> tuple[torch.device | None, bool]:
            return checks.check_init_device(init_device, meta_initialization)

        found = self._agreed("arguments of set_init_device", check, lambda it: f"meta_initialization={it[1]}")
        self.init_device, self.meta_initialization = found
