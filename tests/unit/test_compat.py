"""Workarounds of other projects: each does its work, and the test fails when the project offers the same to all."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.autograd import graph, profiler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

import xffl.compat
from tests.worlds import fake_world
from xffl.aggregation.steps.step_observers import may_be_wrapped
from xffl.cluster.environment import detect_environment, request_federation, requested_federation
from xffl.compat.datasets import ENVIRON
from xffl.compat.ddp import delayed_parameters, find_in_reducer, parameters_at_start, running_wrapper
from xffl.compat.deepspeed import variables_for_import, without_shared_memory
from xffl.compat.fsdp import GradientSync, gradient_sync
from xffl.compat.group_names import fresh_group_name, fresh_names
from xffl.compat.libc import return_large_blocks
from xffl.compat.lightning import choose_checkpoint
from xffl.compat.optimizer_steps import enclosing_steps
from xffl.compat.python import end_thread
from xffl.compat.pytorch import (
    DispatchMode,
    call_at_end_of_backward,
    is_in_backward,
    is_out_of_memory,
    is_profiling,
    lasting_memory,
    memory_of,
)
from xffl.compat.sockets import (
    count_open_files,
    find_connections,
    limit_silence,
    name_of_socket,
    open_sockets,
    sockets_opened_since,
)

FILES = sorted(path for path in Path(xffl.compat.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_workaround_says_which_version_needs_it_and_where_to_look(path: Path) -> None:
    module = importlib.import_module(f"xffl.compat.{path.stem}")
    for name in module.__all__:
        text = f"{module.__doc__} {getattr(module, name).__doc__}"
        assert re.search(r"\b\d\.\d+\b", text) and "https://" in text, name


# transformers ---------------------------------------------------------------------------------------------------------


def test_a_trainer_has_no_public_way_to_save_a_checkpoint() -> None:
    transformers = pytest.importorskip("transformers")
    public = [name for name in dir(transformers.Trainer) if "save" in name and not name.startswith("_")]
    assert public == ["save_metrics", "save_model", "save_state"]  # else save_checkpoint may go


# datasets -------------------------------------------------------------------------------------------------------------


def test_datasets_puts_a_copy_in_the_place_of_the_environment() -> None:
    """What a script sets after that is read by xffl, and what xffl sets is read by the script."""
    datasets = pytest.importorskip("datasets")
    before = os.environ
    datasets.Dataset.from_dict({"number": [0, 1]}).map(lambda row: row, num_proc=2)
    assert os.environ is not before  # else ENVIRON may go
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    os.environ |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    os.environ["XFFL_FEDERATED"] = "1"
    assert detect_environment().rank == 1 and requested_federation() == (1, None)
    request_federation(2, None)
    assert os.environ["XFFL_FEDERATED"] == "2" and ENVIRON["XFFL_FEDERATED"] == "2"
    del ENVIRON["XFFL_FEDERATED"]
    assert "XFFL_FEDERATED" not in os.environ and dict(ENVIRON) == dict(os.environ) and len(ENVIRON) == len(os.environ)
    subprocess.run([sys.executable, "-c", "import os; assert os.environ['RANK'] == '1'"], env=ENVIRON, check=True)


# Lightning ------------------------------------------------------------------------------------------------------------


def test_lightning_takes_no_checkpoint_from_a_callback(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    boring = importlib.import_module("lightning.pytorch.demos.boring_classes")
    path = str(tmp_path / "missing.ckpt")

    class Chooser(lightning.Callback):  # type: ignore[misc,name-defined]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            trainer.ckpt_path = path

    class Replacer(lightning.Callback):  # type: ignore[misc,name-defined]
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            choose_checkpoint(trainer, lambda given: path)

    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_steps": 1}
    options |= {"enable_progress_bar": False, "limit_val_batches": 0, "default_root_dir": str(tmp_path)}
    lightning.Trainer(callbacks=[Chooser()], **options).fit(boring.BoringModel())  # else choose_checkpoint may go
    with pytest.raises(FileNotFoundError, match="missing"):
        lightning.Trainer(callbacks=[Replacer()], **options).fit(boring.BoringModel())


# PyTorch --------------------------------------------------------------------------------------------------------------


def test_torch_has_no_public_way_to_know_of_a_backward_pass() -> None:
    seen: list[object] = []
    values = torch.ones(2, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        seen.append(is_in_backward())
        call_at_end_of_backward(lambda: seen.append("end"))

    values.register_hook(hook)
    values.sum().backward()
    assert seen == [True, "end"] and not is_in_backward()
    assert not hasattr(graph, "is_backward_executing"), "use it in place of is_in_backward"
    assert not hasattr(graph, "queue_callback"), "use it in place of call_at_end_of_backward"


def test_fsdp_has_no_public_way_to_know_what_a_backward_pass_reduces() -> None:
    with fake_world(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        inner: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
        model = fully_shard(nn.Sequential(inner), mesh=mesh)
        assert gradient_sync(model) == GradientSync(reduces=True, all_reduces=True)
        inner.set_requires_all_reduce(False)
        assert gradient_sync(model) == GradientSync(reduces=True, all_reduces=False), "the outer one has no parameters"
    names = {name for name in dir(FSDPModule) if re.search("gradient_sync|all_reduce", name)}
    setters = {"set_all_reduce_hook", "set_requires_all_reduce", "set_requires_gradient_sync"}
    assert names == setters, "one of them may tell it, in place of gradient_sync"


def test_torch_has_no_public_way_to_know_of_a_profiler() -> None:
    assert not is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiling()
    public = {name for name in (*dir(profiler), *dir(torch.profiler)) if not name.startswith("_")}
    assert not {name for name in public if re.search("is_.*(enabled|profiling)|enabled$", name)}


def test_torch_has_no_error_of_its_own_for_a_host_without_memory() -> None:
    with pytest.raises(RuntimeError) as lack:
        torch.empty(2**60, dtype=torch.uint8)
    assert type(lack.value) is RuntimeError
    assert is_out_of_memory(lack.value) and is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


def test_torch_does_not_tell_a_step_hook_in_which_step_it_is() -> None:
    text = "class Twice(SGD):\n    def step(self, closure=None):\n        return super().step(closure)\n"
    names: dict[str, Any] = {"SGD": torch.optim.SGD}
    exec(compile(text, "another_file.py", "exec"), names)
    calls: list[list[torch.optim.Optimizer]] = []
    torch.optim.SGD(
        [torch.nn.Parameter(torch.ones(1))], lr=0.1
    )  # torch wraps the step of a class with its first object
    optimizer = names["Twice"]([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(enclosing_steps()))
    optimizer.step()
    assert calls == [[optimizer], []]  # torch calls the hook once in the parent's step, and once in its own


def test_tensors_have_no_buffer_protocol() -> None:
    values = torch.arange(4, dtype=torch.int32)
    memory_of(values)[:4] = (7).to_bytes(4, sys.byteorder)
    assert values.tolist() == [7, 1, 2, 3]
    values.untyped_storage().resize_(32)  # nobody holds it
    with pytest.raises(TypeError):
        memoryview(values)  # type: ignore[arg-type]
    shared = torch.arange(4)
    view = shared.numpy()
    with pytest.raises(RuntimeError, match="resiz"):
        shared.untyped_storage().resize_(64)
    del view


def test_a_view_of_a_tensors_memory_leaves_nothing_to_collect() -> None:
    tensor = torch.zeros(300)
    gc.collect()
    views = [memory_of(tensor[:length]) for length in range(300)]
    views[-1].cast("f")[7] = 1.0
    assert [len(view) for view in views] == list(range(0, 1200, 4)) and tensor[7] == 1.0
    del views
    assert gc.collect() == 0


def test_torch_asks_for_huge_pages_for_all_tensors_or_for_none() -> None:
    def flags_at(tensor: torch.Tensor) -> str:
        """Return what Linux notes of the mapping in which a tensor lies; hg: huge pages were asked for."""
        is_there = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if place := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                is_there = int(place[1], 16) <= tensor.data_ptr() < int(place[2], 16)
            elif is_there and line.startswith("VmFlags"):
                return line
        return ""

    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        large, small = lasting_memory(10**7 + 1, dtype), lasting_memory(3, dtype)
        assert (large.numel(), large.dtype, small.numel(), small.dtype) == (10**7 + 1, dtype, 3, dtype)
        assert not any(tensor.view(torch.uint8).any() for tensor in (large, small))
        large.view(torch.uint8).fill_(1)
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            assert " hg" in flags_at(large)
    if os.environ.get("THP_MEM_ALLOC_ENABLE", "0") != "1":
        assert " hg" not in flags_at(torch.zeros(10**7))


def test_large_memory_that_a_host_lacks_is_out_of_memory() -> None:
    with pytest.raises((MemoryError, RuntimeError), match="4611686018427387904 bytes") as caught:
        lasting_memory(2**60, torch.float32)
    assert is_out_of_memory(caught.value)


def test_ddp_does_not_tell_whose_gradients_it_reduces(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        module = torch.nn.parallel.DistributedDataParallel(model)
        made_with = parameters_at_start(module)
        assert made_with is not None and set(map(id, made_with)) == set(map(id, model.parameters()))
        assert delayed_parameters(module) == []
        assert find_in_reducer(module, 2) is None  # all of them train
        model.bias.requires_grad_(False)
        assert find_in_reducer(module, 1) == set(map(id, model.parameters()))
        callers: list[torch.nn.Module | None] = []
        model.register_forward_pre_hook(lambda *_: callers.append(running_wrapper()))
        model(torch.ones(1, 2))
        module(torch.ones(1, 2))
        assert callers == [None, module]
        lists = {name for name, value in vars(module).items() if isinstance(value, (list, tuple, set)) and value}
        assert not {name for name in lists if not name.startswith("_")}, "one of them may tell what DDP was made with"
    finally:
        dist.destroy_process_group()


def test_ddp_refuses_the_dtensors_of_fsdp2(tmp_path: Path) -> None:
    """So only a model with plain parameters is watched for a wrapper over several cells."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, sharded = torch.nn.Linear(2, 2), fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        assert may_be_wrapped(plain) and not may_be_wrapped(sharded)
        for model in (sharded, torch.nn.Sequential(plain, sharded)):
            with pytest.raises((NotImplementedError, RuntimeError)):
                torch.nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()


def test_torch_has_no_public_mode_that_sees_each_operator() -> None:
    seen: list[str] = []

    class Seen(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(2) + 1
    assert seen == ["ones", "add"]
    assert not {name for name in (*dir(torch), *dir(torch.utils)) if re.search("dispatch_?mode", name, re.IGNORECASE)}


def test_dtensors_have_no_public_way_to_keep_a_ranks_random_state() -> None:
    public = {name for name in dir(torch.distributed.tensor) if not name.startswith("_")}
    assert not {name for name in public if re.search("rng|random_state|seed|tracker", name, re.IGNORECASE)}, public
    tracker = importlib.import_module("torch.distributed.tensor._random").OffsetBasedRNGTracker
    assert "run_state_sync" in inspect.signature(tracker).parameters


def test_torch_takes_equal_meshes_of_two_worlds_for_one(tmp_path: Path) -> None:
    # The mesh that an operator's cached result has; without fresh names, that of the world before.
    def mesh_of_result(world: str, name_of: Callable[[str], str]) -> tuple[DeviceMesh, DeviceMesh]:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{world}", rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            assert group is not None
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name_of("compat"),))
            values = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
            result = values + values
            assert isinstance(result, DTensor)
            return mesh, result.device_mesh
        finally:
            dist.destroy_process_group()

    first, of_first = mesh_of_result("first", str)
    again, of_again = mesh_of_result("again", str)
    assert of_first is first and first == again
    assert of_again is first  # fails when torch tells them apart: then fresh_names is not needed any more
    assert fresh_names("compat")("compat") == "compat"
    third, of_third = mesh_of_result("third", fresh_names("compat"))
    assert third not in (first, again) and of_third is third
    assert third.mesh_dim_names is not None and str(third.mesh_dim_names[0]) == "compat"


def test_torch_gives_a_group_the_name_of_one_that_there_is(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)

    def make() -> dist.ProcessGroup:
        group = dist.new_group([0], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    try:
        first, _ = make(), make()
        dist.destroy_process_group(first)
        with pytest.raises(ValueError, match="already been created"):
            make()  # fails when torch names it otherwise: then fresh_group_name is not needed any more
        names: list[str] = []
        for _ in range(3):
            with fresh_group_name([0]):
                group = make()
            names.append(group.group_name)
            dist.destroy_process_group(group)
        assert len(set(names)) == 3
    finally:
        dist.destroy_process_group()


# Sockets --------------------------------------------------------------------------------------------------------------


def test_sockets_of_libraries_are_found_among_those_of_the_process() -> None:
    before = open_sockets()
    files = count_open_files()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert count_open_files() == files + 1
        here = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", here)) as one, server.accept()[0] as other:
            opened = sockets_opened_since(before)
            assert opened == {server.fileno(), one.fileno(), other.fileno()}
            limit_silence(one.fileno(), 10)
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            # Both ends are of a connection to somebody who listens here: those of others may come and go.
            assert find_connections(opened, {server.fileno(): name_of_socket(server.fileno())}, 1, 2) == {}
            # One that was closed has left its number to that at which the group listens.
            assert find_connections(opened, {server.fileno(): "socket:[1]"}, 1, 2).keys() == {
                one.fileno(),
                other.fileno(),
            }
            name = name_of_socket(one.fileno())
            assert name.startswith("socket:")
    assert name_of_socket(one.fileno()) == ""


def test_a_socket_with_the_number_of_one_that_was_closed_is_a_new_one() -> None:
    with socket.socket() as former:
        number = former.fileno()
        before = open_sockets()
    with socket.socket() as later:
        assert later.fileno() == number
        assert number in sockets_opened_since(before)


def test_a_number_that_is_no_socket_any_more_leaves_no_descriptor_behind() -> None:
    """A socket that was found may be closed, and its number taken by a pipe, before it is used."""
    reading, writing = os.pipe()
    held = len(os.listdir("/proc/self/fd"))
    limit_silence(reading, 10)
    assert find_connections({reading}, {writing: name_of_socket(writing)}, 1, 1) == {}
    assert len(os.listdir("/proc/self/fd")) == held
    os.close(reading)
    os.close(writing)


def test_gloo_has_no_option_of_a_group_that_connects_lazily() -> None:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    assert not [name for name in dir(options) if "lazy" in name.lower()], "use it in place of connect_as"


class AddressOfSomebodyElse(dist.Store):  # type: ignore[name-defined,misc]
    """A store from which one rank reads its own address in place of that of another, with another port."""

    address = b""

    def set(self, key: str, value: bytes) -> None:
        if len(value) > 100:
            self.address = bytes(value)

    def get(self, key: str) -> bytes:
        found = re.search(rb"\x02\x00..\x7f\x00\x00\x01", self.address, re.DOTALL)
        assert found is not None, "an address of IPv4 and loopback"
        # gloo waits for a connection from the higher port.
        return self.address.replace(found[0], b"\x02\x00\xff\xff" + found[0][4:])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None: ...

    def has_extended_api(self) -> bool:
        return False


def test_gloo_waits_for_a_connection_for_five_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a rank leaves a thread with it (groups.Making), and looks for lost ranks by itself (lost_in_connecting)."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]ime"):
        dist.ProcessGroupGloo(AddressOfSomebodyElse(), 0, 2, timedelta(seconds=0.2))
    assert time.monotonic() - begun > 3 * 0.2, "neither is needed any more if this is about one timeout"


def test_gloo_has_no_option_by_which_a_silent_connection_ends() -> None:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    names = {name for name in dir(options) if not name.startswith("_")}
    assert not {name for name in names if re.search("alive|silen|user_timeout|socket|descriptor", name)}, names


# Python and the C library ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_python_has_no_way_to_end_a_thread() -> None:
    begun = threading.Event()

    def run() -> None:
        begun.set()
        while True:
            time.sleep(0.001)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(10) and thread.ident is not None
    end_thread(thread.ident)
    thread.join(10)
    assert not thread.is_alive()
    public = {name for name in dir(thread) if not name.startswith("_")}
    assert not {name for name in public if re.search("stop|kill|cancel|end$|interrupt", name)}


def test_python_has_no_call_for_the_allocator_or_the_death_of_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    assert not return_large_blocks()  # the user has decided
    names = (*dir(os), *dir(sys), *dir(gc), *dir(signal))
    assert not {name for name in names if re.search("mallopt|prctl|pdeathsig|death", name, re.IGNORECASE)}


def test_a_signal_gets_its_default_from_any_thread() -> None:
    code = (
        "import os, signal, threading, time\n"
        "from xffl.compat.libc import reset_handler\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "try:\n"
        "    raise SystemExit(0)\n"
        "except SystemExit:\n"
        "    threading.Thread(target=reset_handler, args=[signal.SIGTERM]).start()\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(10)\n"
    )
    root = Path(xffl.compat.__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60)
    assert ran.returncode == -signal.SIGTERM
    with pytest.raises(ValueError, match="main thread"):
        raise _error_of_a_thread()


def _error_of_a_thread() -> Exception:
    """Return why Python lets a thread set no handler."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0]


# torchft and DeepSpeed ------------------------------------------------------------------------------------------------


def test_managers_of_torchft_take_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("torchft.manager")
    from xffl.compat.torchft import managers_at

    assert not {name for name in inspect.signature(manager.Manager).parameters if "bind" in name}, "use the argument"
    told: dict[str, object] = {}
    monkeypatch.setattr(manager, "ManagerServer", lambda **options: told.update(options))
    server = manager.ManagerServer
    with managers_at("10.0.0.1"):
        manager.ManagerServer(bind="[::]:0", hostname="a")
    assert told == {"bind": "10.0.0.1:0", "hostname": "a"} and manager.ManagerServer is server


def test_deepspeed_is_told_by_variables_and_compiles_what_its_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with variables_for_import("1", "cpu"):
        assert (os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]) == ("1", "cpu")
        os.environ["CROSS_SIZE"] = "1"  # as DeepSpeed sets some
    assert os.environ["LOCAL_RANK"] == "3" and not {"DS_ACCELERATOR", "CROSS_SIZE"} & os.environ.keys()
    for operations in ({"deepspeed_shm_comm": True, "other": True}, {"other": True}):
        kept: dict[str, object] = dict(operations)
        with without_shared_memory(operations):
            assert operations == {**kept, "deepspeed_shm_comm": False}
        assert operations == kept


def test_deepspeed_still_compiles_its_operation_wherever_its_table_has_it() -> None:
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        pytest.skip("deepspeed is not installed")
    # As text: importing DeepSpeed sets variables, and starts processes.
    text = (Path(found.origin).parent / "comm" / "torch.py").read_text(encoding="utf-8")
    assert "ShareMemCommBuilder" in text or "shm_comm" in text, "nothing is compiled any more"
