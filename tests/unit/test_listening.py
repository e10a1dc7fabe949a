"""Where processes of a job listen, and what ranks find at an address where nobody, or somebody else, is."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.listening import Listener, find_listeners
from tests.ports import free_port
from xffl.cluster import listening, reaching
from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.listening import gloo_beyond_this_host, open_listener
from xffl.cluster.network import (
    LOCAL_VARIABLE,
    Interface,
    control_address,
    keep_gloo_local,
    list_interfaces,
    release_gloo,
)
from xffl.cluster.reaching import await_listener
from xffl.distributed.startup import joining, stores
from xffl.distributed.startup.joining import join_store
from xffl.distributed.startup.stores import serve_store
from xffl.errors import LaunchError

OWN = [one.address for one in list_interfaces() if one.address and not one.is_loopback]


def addresses_at(port: int) -> set[str]:
    """Return the addresses at which this process listens with a port."""
    return {one.address for one in find_listeners({os.getpid()}) if one.port == port}


def name_for(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> str:
    """Let a name resolve to addresses."""
    real = socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **options: Any) -> Any:
        if host != "rank0.example":
            return real(host, *rest, **options)
        return [entry for address in addresses for entry in real(address, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return "rank0.example"


def test_sockets_are_found_with_their_addresses() -> None:
    """The oracle of the tests of sockets: it sees both families, and tells loopback from all addresses."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("", 0)) as two,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as three,
    ):
        expected = {("127.0.0.1", one), ("0.0.0.0", two), ("::1", three)}
        found = find_listeners({os.getpid()})
        assert {Listener(os.getpid(), address, own.getsockname()[1]) for address, own in expected} <= found
    assert [Listener(1, address, 1).is_loopback for address in ("127.0.0.1", "::1", "0.0.0.0", "::")] == [1, 1, 0, 0]
    assert [Listener(1, address, 1).is_everywhere for address in ("127.0.0.1", "0.0.0.0", "::")] == [0, 1, 1]


# Where rank 0 listens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "is_local"), [("any.example", True), ("127.0.0.1", False), ("localhost", True)])
def test_a_store_of_one_host_is_on_loopback_alone(host: str, is_local: bool) -> None:
    store = serve_store(host, 0, 2, timedelta(seconds=5), is_local=is_local)
    assert addresses_at(store.port) == {"127.0.0.1"}
    other = join_store(host, store.port, 2, 5, is_local=is_local)
    store.set("key", "value")
    assert other.get("key") == b"value" and other.timeout == timedelta(seconds=5)  # type: ignore[attr-defined]


@pytest.mark.skipif(not OWN, reason="this host has no address but loopback")
@pytest.mark.parametrize("names", [[], ["127.0.1.1"], ["203.0.113.7"], ["127.0.1.1", "203.0.113.7"]])
def test_a_store_of_several_hosts_is_at_the_address_of_the_name(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Debian lets a host's own name be 127.0.1.1, and others may be those of a router."""
    host = name_for(monkeypatch, *names, str(OWN[0]))
    store = serve_store(host, 0, 2, timedelta(seconds=5), is_local=False)
    assert addresses_at(store.port) == {OWN[0]} and capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["127.0.1.1", "203.0.113.7"])
def test_where_the_name_is_of_no_use_the_named_interface_counts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("XFFL_CONTROL_IFNAME", "XFFL_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(stores, "await_listener", lambda *_: None)
    host = name_for(monkeypatch, name)
    everywhere = serve_store(host, 0, 2, timedelta(seconds=5), is_local=False)
    assert addresses_at(everywhere.port) == {"0.0.0.0"}
    assert f"port {everywhere.port} of all of its addresses; set XFFL_CONTROL_IFNAME" in capsys.readouterr().err
    monkeypatch.setattr(listening, "control_address", lambda environ: "127.0.0.3")
    monkeypatch.setattr(listening, "is_loopback", lambda host: host == "127.0.1.1")
    named = open_listener(host, 0, is_local=False)
    with named.socket:
        assert addresses_at(named.port) == {"127.0.0.3"} and not named.is_everywhere


def test_rank_0_finds_out_that_an_address_does_not_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XFFL_CONTROL_IFNAME", "XFFL_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(stores, "_BACK_S", 0.3)
    with pytest.raises(LaunchError, match=r"nothing answers at 198.51.100.1:\d+, where rank 0 is to listen"):
        serve_store("198.51.100.1", 0, 2, timedelta(seconds=600), is_local=False)
    monkeypatch.setattr(listening, "list_interfaces", lambda: (Interface("ib0", False, "127.0.0.1"),))
    with pytest.raises(LaunchError, match="interface of 127.0.0.1 on .* is down .ib0 127.0.0.1 down.*set MASTER_ADDR"):
        serve_store("127.0.0.1", 0, 2, timedelta(seconds=600), is_local=False)


def test_ranks_of_one_host_are_told_from_others() -> None:
    def place(launcher: str, *numbers: int, address: str | None = "n1") -> ProcessEnvironment:
        world_size, local_size, nodes = numbers
        return ProcessEnvironment(0, world_size, 0, local_size, 0, nodes, address, 1, launcher)

    assert place("none", 1, 1, 1, address=None).is_on_one_host
    assert place("slurm", 4, 4, 1).is_on_one_host and place("torchrun", 4, 4, 1).is_on_one_host
    assert not place("slurm", 4, 2, 2).is_on_one_host and not place("torchrun", 4, 3, 2).is_on_one_host
    # Without arguments for the nodes all ranks count as those of one, wherever they are.
    assert not place("arguments", 4, 4, 1).is_on_one_host
    assert place("arguments", 4, 4, 1, address="localhost").is_on_one_host


# What is wrong with an address ----------------------------------------------------------------------------------------


def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_BUSY_S", 0.3)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for host, is_local in (("127.0.0.1", False), ("n1", True)):
            with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 .*held by another.* set MASTER_PORT"):
                serve_store(host, port, 2, timedelta(seconds=600), is_local=is_local)
        threading.Timer(0.2, other.close).start()  # a job that ends while this one starts
        monkeypatch.setattr(listening, "_BUSY_S", 10.0)
        assert serve_store("127.0.0.1", port, 2, timedelta(seconds=5), is_local=True).port == port


def test_an_address_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_NO_WAY_S", 0.2)
    for call in (
        lambda: serve_store("no-such-host.invalid", 1, 2, timedelta(seconds=600), is_local=False),
        lambda: join_store("no-such-host.invalid", 1, 2, 600, is_local=False),
        lambda: await_listener("a" * 70 + ".invalid", 1, 600),
    ):
        with pytest.raises(LaunchError, match=r"'\S+invalid', where ranks are to meet, does not resolve.*MASTER_ADDR"):
            call()


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, None])
def test_a_network_that_is_down(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors; ``None``: packets are dropped."""
    tries = []

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(timeout)
        raise TimeoutError("timed out") if number is None else OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_connection", connect)
    for name, value in (("_NO_WAY_S", 0.1), ("_SILENT_S", 0.1), ("_PAUSE_S", 0.02)):
        monkeypatch.setattr(reaching, name, value)
    with pytest.raises(LaunchError, match=r"nothing answers at 127.0.0.1:9, .*MASTER_ADDR and MASTER_PORT"):
        join_store("127.0.0.1", 9, 2, 600, is_local=False)
    few = len(tries)
    with pytest.raises(LaunchError, match="tried for 0.4 s"):  # who has said how long to wait for the ranks
        await_listener("127.0.0.1", 9, 0.4, is_patient=True)
    assert len(tries) > 2 * few


def test_a_rank_0_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_NO_WAY_S", "_SILENT_S"):
        monkeypatch.setattr(reaching, limit, 0.1)
    port, made = free_port(), []
    timer = threading.Timer(
        0.7, lambda: made.append(serve_store("localhost", port, 2, timedelta(seconds=5), is_local=True))
    )
    timer.start()
    assert isinstance(join_store("localhost", port, 2, 20, is_local=True), TCPStore)
    with pytest.raises(LaunchError, match="tried for 1 s"):
        join_store("localhost", free_port(), 2, 0.5, is_local=True)


def _say_nothing(connection: socket.socket) -> None:
    connection.recv(1)
    time.sleep(30)


def _say_http(connection: socket.socket) -> None:
    connection.recv(64)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


def _drip(connection: socket.socket) -> None:
    for _ in range(30):
        connection.sendall(b"x")
        time.sleep(0.2)


@pytest.mark.parametrize("answer", [_say_nothing, _say_http, _drip, socket.socket.close])
def test_another_program_at_the_port_is_no_store(
    answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch itself waits without end for the first."""
    monkeypatch.setattr(joining, "_ANSWER_S", 0.3)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_without_errors, args=(answer, connection), daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, args=[listener], daemon=True).start()
        port, begun = listener.getsockname()[1], time.monotonic()
        with pytest.raises(LaunchError, match=f"at 127.0.0.1:{port} is not the store of rank 0 .*set MASTER_PORT"):
            join_store("127.0.0.1", port, 2, 600, is_local=False)
        assert time.monotonic() - begun < 10
        threads = [thread for thread in threading.enumerate() if thread.name == "xffl-store"]
        for thread in threads:  # a thread that waits for ever may abort the process when that ends
            thread.join(5)
        assert not any(thread.is_alive() for thread in threads)
        listener.shutdown(socket.SHUT_RDWR)


def _without_errors(answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
    try:
        answer(connection)
    except OSError:
        return  # the other side has gone


# gloo -----------------------------------------------------------------------------------------------------------------


def test_gloo_is_on_loopback_unless_an_interface_is_named() -> None:
    environ: dict[str, str] = {}
    keep_gloo_local(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", LOCAL_VARIABLE: "lo"}
    assert control_address(environ) is None  # it is no answer to where others find this host
    assert control_address({**environ, "XFFL_IFNAME": "lo"}) == "127.0.0.1"
    with gloo_beyond_this_host("127.0.0.1", environ):
        assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    with gloo_beyond_this_host("10.0.0.1", environ):
        assert not environ
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", LOCAL_VARIABLE: "lo"}
    release_gloo(environ)
    assert not environ
    for name in ("lo", "eth0,eth1"):
        environ = {"GLOO_SOCKET_IFNAME": name}
        keep_gloo_local(environ)
        with gloo_beyond_this_host("10.0.0.1", environ):
            assert environ == {"GLOO_SOCKET_IFNAME": name}
        release_gloo(environ)
        assert environ == {"GLOO_SOCKET_IFNAME": name}
