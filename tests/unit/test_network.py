"""Interfaces by name for control and data, and timeouts that are in order."""

from __future__ import annotations

import errno
import socket
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.test_environment import FakeWorld, fake_mpi
from xffl.cluster import hosts, network
from xffl.cluster.doctor.compare import ephemeral_ports
from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.hosts import resolve
from xffl.cluster.network import (
    Interface,
    Timeouts,
    control_address,
    list_interfaces,
    use_interface,
)
from xffl.cluster.recognition import launchers
from xffl.cluster.recognition.claims import Claim
from xffl.distributed.startup.meeting import world_store
from xffl.errors import ConfigError, LaunchError
from xffl.training.config.variables import requested_settings

GOOD = {"connect_s": 5.0, "home_s": 60.0, "across_s": 90.0, "session_s": 120.0}


# Timeouts -------------------------------------------------------------------------------------------------------------


def test_levels_in_order_are_taken_and_stay() -> None:
    levels = Timeouts(**GOOD)
    assert (levels.connect_s, levels.session_s) == (5.0, 120.0)
    with pytest.raises(FrozenInstanceError):
        levels.home_s = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("inner, outer", [("connect_s", "home_s"), ("home_s", "across_s"), ("across_s", "session_s")])
@pytest.mark.parametrize("excess", [0.0, 1.0])
def test_an_inner_level_that_outlives_the_next_is_named(inner: str, outer: str, excess: float) -> None:
    with pytest.raises(ConfigError, match=rf"{inner} .* is not less than {outer} .*lower {inner} or raise {outer}"):
        Timeouts(**{**GOOD, inner: GOOD[outer] + excess})


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "60", 1e9])
def test_what_is_no_time_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a positive number of seconds"):
        Timeouts(**{**GOOD, name: value})


@pytest.mark.parametrize("session_s", [0.01, 4.0, 600, 1e8])
def test_levels_below_a_session(session_s: float) -> None:
    levels = Timeouts.within(session_s)
    assert levels.session_s == session_s and levels.home_s == session_s / 2 and levels.across_s == 0.75 * session_s
    assert levels.connect_s <= 30


def test_a_session_of_no_time() -> None:
    for value in (0, True, float("nan"), "600", None):
        with pytest.raises(ConfigError, match="session_s"):
            Timeouts.within(value)  # type: ignore[arg-type]


# Interfaces -----------------------------------------------------------------------------------------------------------


def test_interfaces_of_a_described_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state, flags, speed in (("ib0", "up", "0x1003", "200000"), ("eth1", "down", "0x1002", "-1")):
        (tmp_path / name).mkdir()
        for file, text in (("operstate", state), ("flags", flags), ("speed", speed)):
            (tmp_path / name / file).write_text(text + "\n")
    (tmp_path / "tun0").mkdir()
    (tmp_path / "tun0" / "operstate").write_text("unknown\n")
    (tmp_path / "tun0" / "flags").write_text("0x10d1\n")
    addresses = {"ib0": "10.1.0.7", "tun0": "10.8.0.1"}
    monkeypatch.setattr(network, "_find_address", addresses.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "tun0"), (2, "ib0"), (3, "eth1")])
    assert list_interfaces(tmp_path) == (
        Interface("eth1", False, None, None),
        Interface("ib0", True, "10.1.0.7", 200000),
        Interface("tun0", True, "10.8.0.1", None),
    )
    assert [str(found) for found in list_interfaces(tmp_path)][1] == "ib0 10.1.0.7 up 200 Gbit/s"


def test_loopback_of_this_host() -> None:
    (lo,) = [interface for interface in list_interfaces() if interface.name == "lo"]
    assert lo.is_loopback and lo.is_up and lo.address == "127.0.0.1"


def test_control_and_data_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_address", lambda name, variable: f"{name} of {variable}")
    both = {"XFFL_IFNAME": "ib0", "XFFL_CONTROL_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib1,ib2"}
    for variable, chosen in (("XFFL_CONTROL_IFNAME", "eth0"), ("XFFL_IFNAME", "ib0"), ("GLOO_SOCKET_IFNAME", "ib1")):
        assert control_address(both) == f"{chosen} of {variable}"
        del both[variable]


def test_the_address_for_control() -> None:
    assert control_address({}) is None
    assert control_address({"XFFL_IFNAME": "lo"}) == control_address({"GLOO_SOCKET_IFNAME": "lo,eth0"}) == "127.0.0.1"
    assert control_address({"XFFL_CONTROL_IFNAME": "lo"}) == "127.0.0.1"
    for call in (control_address, lambda environ: use_interface("lo", environ)):
        with pytest.raises(
            LaunchError, match="XFFL_CONTROL_IFNAME: interface 'none9' has no IPv4 .* give one of: .*lo"
        ):
            call({"XFFL_CONTROL_IFNAME": "none9"})


def test_control_does_not_move_the_data() -> None:
    environ = {"XFFL_CONTROL_IFNAME": "lo"}
    assert use_interface(None, environ) is None and "GLOO_SOCKET_IFNAME" not in environ


def test_rank_0_of_mpi_listens_on_the_control_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"eth0": "10.0.0.1", "ib0": "10.9.0.1"}
    monkeypatch.setattr(network, "interface_address", lambda name, _: addresses[name])
    rows = [(Claim(0, 0, 1, "a"), "a"), (Claim(1, 0, 1, "b"), "b")]
    environ = {"XFFL_IFNAME": "ib0"}
    assert launchers._listen_at(0, rows, environ, None, 1) == ("10.9.0.1", 1)
    assert launchers._listen_at(0, rows, {**environ, "XFFL_CONTROL_IFNAME": "eth0"}, None, 1) == ("10.0.0.1", 1)
    assert launchers._listen_at(0, rows, {**environ, "XFFL_CONTROL_IFNAME": "eth0"}, "n1", 1) == ("n1", 1)


def test_data_interfaces_without_an_address_are_told_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib9")])
    environ: dict[str, str] = {}
    with pytest.raises(LaunchError, match="'ib9' has no IPv4 address"):
        use_interface("ib9", environ)
    assert not environ and use_interface("ib9", environ | {"XFFL_CONTROL_IFNAME": "lo"}) == "ib9"


def test_an_interface_that_is_given_beats_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth9")])
    environ = {"XFFL_IFNAME": "eth9"}
    assert use_interface("lo", environ) == "lo"
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert environ["XFFL_IFNAME"] == "lo" and control_address(environ) == "127.0.0.1"
    assert use_interface("lo", {"XFFL_IFNAME": "nosuch0"}) == "lo"


def test_a_wrong_control_interface_is_told_where_data_go_anywhere() -> None:
    with pytest.raises(LaunchError, match="'none9' has no IPv4 address"):
        use_interface(None, {"XFFL_CONTROL_IFNAME": "none9"})


@pytest.mark.parametrize(
    ("name", "interface", "expected"),
    [
        ("XFFL_CONTROL_IFNAME", "lo", "127.0.0.1"),
        ("XFFL_IFNAME", "lo", "127.0.0.1"),
        ("GLOO_SOCKET_IFNAME", "lo", "127.0.0.1"),
        ("XFFL_IFNAME", "", "127.0.0.1"),
    ],
)
def test_the_store_of_the_world_is_on_the_control_interface(
    name: str, interface: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says where; the other takes its word, whatever its own variables say."""
    for other in ("XFFL_CONTROL_IFNAME", "XFFL_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(other, raising=False)
    meeting = TCPStore("127.0.0.1", 0, 1, True)
    places = [ProcessEnvironment(rank, 2, rank, 2, 0, 1, "localhost", meeting.port) for rank in range(2)]
    monkeypatch.setenv(name, interface)
    first = world_store(meeting, places[0], Timeouts.within(30))
    monkeypatch.setenv("XFFL_CONTROL_IFNAME", "none9")
    second = world_store(meeting, places[1], Timeouts.within(30))
    assert isinstance(first, TCPStore) and isinstance(second, TCPStore)
    assert (first.host, first.port) == (second.host, second.port) and first.host == expected


def test_peers_without_a_route_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux knows no way to the first peer."""
    addresses = {socket.gethostname(): "127.0.1.1", "a": "255.255.255.255", "b": "10.0.0.2"}
    monkeypatch.setattr(hosts, "resolve", lambda name: (addresses[name],))
    real = socket.socket.getsockname
    probes: list[object] = []

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            probes.append(address)
            if address[0] == "255.255.255.255":
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self) -> Any:
            return ("10.0.0.1", real(self)[1])

    monkeypatch.setattr(hosts.socket, "socket", Probe)
    assert hosts.reachable_address(["a", "b"]) == "10.0.0.1" and probes == [("255.255.255.255", 9), ("10.0.0.2", 9)]
    with pytest.raises(LaunchError, match="no address that other hosts can reach"):
        hosts.reachable_address(["a"])


def test_whatever_rank_0_meets_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(Claim(0, 0, 1, "a"), "a"), (Claim(1, 0, 1, "b"), "b")]
    fake_mpi(monkeypatch, FakeWorld(2, [row[0] for row in rows], ["a", "b"]))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(launchers, "_listen_at", fail)
    for claim, _ in rows:
        with pytest.raises(
            LaunchError, match="rank 0 has no rendezvous: OSError: .*Too many open files; set MASTER_ADDR"
        ):
            launchers.meet(claim, 2, {}, address=None, port=None)


def test_names_of_variables_are_no_settings() -> None:
    environ = {"XFFL_BIND": "cores", "XFFL_CONTROL_IFNAME": "eth0", "XFFL_TRAINING__EPOCHS": "3"}
    assert requested_settings(environ) == {"XFFL_TRAINING__EPOCHS": "3"}


def test_names_and_ports() -> None:
    assert resolve("127.0.0.1") == ("127.0.0.1",) and resolve("no.such.host.invalid") == ()
    first, last = ephemeral_ports()
    assert 0 < first < last < 65536
