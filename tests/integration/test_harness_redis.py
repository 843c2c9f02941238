"""The harness' Redis servers: alone, under Sentinel, as a cluster; and Valkey."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import ConnectionError, ResponseError, TimeoutError

from tests.integration.test_harness import listening
from tests.servers import finding, processes, session
from tests.servers.base import PORTS
from tests.servers.redis import RedisServer, ValkeyServer
from tests.servers.redis_groups import ClusterGroup, ClusterNode, RedisGroup, SentinelGroup

needs_proc_net = pytest.mark.skipif(
    not processes.PROC.joinpath("net").exists(), reason="reads /proc/net"
)


def put(server: RedisServer, value: str) -> None:
    assert server.ask("SET", "kept", value) == b"OK"


def got(server: RedisServer) -> object:
    return server.ask("GET", "kept")


class TestRedis:
    def test_it_answers_on_its_port_in_bytes(self, redis_server: RedisServer) -> None:
        assert redis_server.url == os.environ[RedisServer.url_variable]
        with redis_server.client() as client:
            assert client.echo("hello") == b"hello"
        if redis_server.owned:
            assert redis_server.port in PORTS

    @needs_proc_net
    @pytest.mark.parametrize("fixture", ["fresh_redis", "fresh_valkey"])
    def test_nothing_listens_beyond_loopback(
        self, request: pytest.FixtureRequest, fixture: str
    ) -> None:
        server = request.getfixturevalue(fixture)
        assert listening(server.pid) == {("tcp", "0100007F", server.port)}

    @pytest.mark.parametrize("fixture", ["fresh_redis", "fresh_valkey"])
    def test_killed_it_comes_back_on_its_port_and_empty(
        self, request: pytest.FixtureRequest, fixture: str
    ) -> None:
        server: RedisServer = request.getfixturevalue(fixture)
        put(server, "old")
        port, pid = server.port, server.pid
        server.kill()
        with pytest.raises(ConnectionError):
            server.ask("PING")
        server.start()
        assert (server.port, server.pid != pid) == (port, True)
        assert got(server) is None

    def test_a_snapshot_brings_back_what_was_there_then(self, fresh_redis: RedisServer) -> None:
        put(fresh_redis, "old")
        fresh_redis.snapshot()
        put(fresh_redis, "new")
        fresh_redis.kill()
        assert got(fresh_redis.start()) == b"old"

        put(fresh_redis, "new")
        fresh_redis.stop()
        assert got(fresh_redis.start()) == b"old", "an end in order writes nothing down either"

        fresh_redis.kill()
        fresh_redis.forget()
        assert got(fresh_redis.start()) is None

    def test_an_append_only_file_keeps_everything_until_it_is_forgotten(
        self, make_redis: Callable[..., RedisServer]
    ) -> None:
        server = make_redis("--appendonly", "yes", "--appendfsync", "always")
        put(server, "old")
        server.kill()
        assert got(server.start()) == b"old"
        server.kill()
        server.forget()
        assert got(server.start()) is None

    def test_arguments_have_the_last_word(self, make_redis: Callable[..., RedisServer]) -> None:
        server = make_redis("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
        assert server.ask("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"3145728"]
        assert server.ask("CONFIG", "GET", "maxmemory-policy")[1] == b"allkeys-lru"

    def test_paused_it_leaves_its_clients_without_an_answer(self, fresh_redis: RedisServer) -> None:
        fresh_redis.pause()
        with fresh_redis.client(socket_timeout=0.2) as client, pytest.raises(TimeoutError):
            client.ping()
        fresh_redis.resume()
        assert fresh_redis.ask("PING") == b"PONG"

    def test_a_client_tries_nothing_twice(self, redis_server: RedisServer) -> None:
        attempts = []

        def fail() -> None:
            attempts.append(1)
            raise ConnectionError

        with redis_server.client() as client, pytest.raises(ConnectionError):
            client.get_connection_kwargs()["retry"].call_with_retry(fail, lambda error: None)
        assert len(attempts) == 1

    def test_a_replica_follows_its_master_over_a_restart(
        self, make_redis: Callable[..., RedisServer]
    ) -> None:
        master, replica = make_redis(), make_redis()
        assert not replica.is_replica_in_sync()
        put(replica, "lost")
        put(master, "old")
        replica.replicate(master)
        assert processes.wait_until(replica.is_replica_in_sync, 10)
        assert got(replica) == b"old"
        with pytest.raises(ResponseError, match="read only replica"):
            put(replica, "refused")

        replica.kill()
        put(master, "new")
        replica.start()
        assert processes.wait_until(replica.is_replica_in_sync, 10)
        assert got(replica) == b"new"
        master.kill()
        assert not replica.is_replica_in_sync()

    def test_a_stopped_server_can_be_told_its_master(
        self, make_redis: Callable[..., RedisServer]
    ) -> None:
        one, other, replica = make_redis(), make_redis(), make_redis()
        replica.replicate(one)
        replica.kill()
        put(other, "new")
        replica.replicate(other)
        replica.start()
        assert processes.wait_until(replica.is_replica_in_sync, 10)
        assert got(replica) == b"new"

    def test_another_server_on_its_port_is_not_taken_for_it(self, fresh_redis: RedisServer) -> None:
        assert fresh_redis.program is not None
        other = RedisServer(fresh_redis.program)
        other.port = fresh_redis.port
        with other:
            assert other.port != fresh_redis.port
            assert other.info("server")["process_id"] == other.pid

    def test_it_is_ended_with_its_data(self, fresh_redis: RedisServer) -> None:
        folder, pid = fresh_redis.folder, fresh_redis.pid
        fresh_redis.pause()
        fresh_redis.close()
        assert not folder.exists()
        assert not processes.is_alive(pid)

    def test_somebody_elses_server_is_never_touched(self, redis_server: RedisServer) -> None:
        external = RedisServer(url=redis_server.url)
        assert external.is_ready()
        for verb in (external.kill, external.pause, external.stop, external.start):
            with pytest.raises(pytest.skip.Exception, match="is not ours"):
                verb()
        external.close()
        assert external.is_ready()


class TestValkey:
    def test_it_is_valkey_and_the_environment_names_it(self, valkey_server: ValkeyServer) -> None:
        assert "valkey_version" in valkey_server.info("server")
        assert valkey_server.url == os.environ[ValkeyServer.url_variable]
        assert session.on_demand(ValkeyServer) is valkey_server


class TestSentinel:
    def test_the_sentinels_name_the_master(self, redis_sentinel: SentinelGroup) -> None:
        from redis.sentinel import Sentinel

        sentinel = Sentinel(redis_sentinel.sentinels, socket_timeout=2)
        master = redis_sentinel.master()
        assert sentinel.discover_master(redis_sentinel.service) == (master.host, master.port)
        assert len(sentinel.discover_slaves(redis_sentinel.service)) == 2
        for client in sentinel.sentinels:
            client.close()

    def test_the_run_has_one_and_names_it_in_the_environment(
        self, redis_sentinel: SentinelGroup
    ) -> None:
        session.start_for("redis_sentinel")
        assert session.group(SentinelGroup) is redis_sentinel
        service, _, addresses = os.environ[SentinelGroup.variable].partition("@")
        assert service == redis_sentinel.service
        assert addresses.split(",") == [f"{h}:{p}" for h, p in redis_sentinel.sentinels]

    @needs_proc_net
    def test_nothing_listens_beyond_loopback(self, redis_sentinel: SentinelGroup) -> None:
        for member in redis_sentinel.members:
            assert listening(member.pid) == {("tcp", "0100007F", member.port)}

    def test_another_master_takes_over_time_and_again(
        self, fresh_redis_sentinel: SentinelGroup
    ) -> None:
        group = fresh_redis_sentinel
        old = group.master()
        new = group.failover()
        assert new is group.master()
        assert new is not old
        assert new.running
        put(new, "new")

        group.heal()
        assert group.running
        assert group.master() is new
        assert got(old) == b"new"
        third = group.failover()
        assert third is not new
        assert got(third) == b"new"

    def test_a_master_that_comes_back_does_not_know_of_the_other(
        self, fresh_redis_sentinel: SentinelGroup
    ) -> None:
        old = fresh_redis_sentinel.master()
        fresh_redis_sentinel.failover()
        old.start()
        assert old.info("replication")["role"] == "master"
        assert fresh_redis_sentinel.master() is not old

    def test_it_is_ended_with_its_data(self, fresh_redis_sentinel: SentinelGroup) -> None:
        fresh_redis_sentinel.master().pause()
        check_ending(fresh_redis_sentinel)


class TestCluster:
    def test_a_client_finds_every_slot(self, redis_cluster: ClusterGroup) -> None:
        from redis.cluster import ClusterNode as Node
        from redis.cluster import RedisCluster

        nodes = [Node(host, port) for host, port in redis_cluster.startup_nodes]
        client = RedisCluster(startup_nodes=nodes)
        for number in range(20):
            key = f"{{{number}}}"
            client.set(key, number, px=10_000)
            owner = redis_cluster.master_of(key)
            assert owner.ask("GET", key) == str(number).encode()
            assert redis_cluster.master_of(redis_cluster.slot_of(key)) is owner
        client.close()

    def test_each_master_has_a_replica(self, redis_cluster: ClusterGroup) -> None:
        replicas = {redis_cluster.replica_of(slot) for slot in (0, 8000, 16383)}
        assert replicas == set(redis_cluster.nodes[3:])

    def test_the_run_has_one_and_names_it_in_the_environment(
        self, redis_cluster: ClusterGroup
    ) -> None:
        session.start_for("redis_cluster")
        assert session.group(ClusterGroup) is redis_cluster
        addresses = os.environ[ClusterGroup.variable].split(",")
        assert addresses == [f"{h}:{p}" for h, p in redis_cluster.startup_nodes]

    @needs_proc_net
    def test_nothing_listens_beyond_loopback(self, redis_cluster: ClusterGroup) -> None:
        for node in redis_cluster.nodes:
            ports = (node.port, node.port + ClusterNode.bus)
            assert listening(node.pid) == {("tcp", "0100007F", port) for port in ports}

    def test_a_replica_takes_over_time_and_again(self, fresh_redis_cluster: ClusterGroup) -> None:
        group = fresh_redis_cluster
        old, replica = group.master_of("kept"), group.replica_of("kept")
        new = group.failover("kept")
        assert new is replica
        assert group.master_of("kept") is new
        assert group.replica_of("kept") is None
        put(new, "new")

        group.heal()
        assert group.replica_of("kept") is old
        assert group.failover("kept") is old
        assert got(old) == b"new"

    def test_it_is_ended_with_its_data(self, fresh_redis_cluster: ClusterGroup) -> None:
        fresh_redis_cluster.master_of(0).pause()
        check_ending(fresh_redis_cluster)


class TestFinding:
    def test_a_link_to_a_program_of_another_name_keeps_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        several = tmp_path / "several-in-one"
        several.touch(0o755)
        link = tmp_path / "no-such-redis"
        link.symlink_to(several)

        class Kind(RedisServer):
            executable = "no-such-redis"

        monkeypatch.setenv("PATH", str(tmp_path))
        assert finding.installed(Kind) == link

    def test_without_a_program_a_group_is_not_to_be_had_beside_a_given_server(
        self, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
    ) -> None:
        monkeypatch.setattr(session, "_groups", {})
        monkeypatch.setattr(finding, "installed", lambda kind: None)
        assert session.private(RedisServer) is None
        assert session.group(ClusterGroup) is None
        with pytest.raises(pytest.skip.Exception, match="keeps us from installing"):
            session.start_for("redis_cluster")


def check_ending(group: RedisGroup) -> None:
    pids = [member.pid for member in group.members]
    folders = [member.folder for member in group.members]
    group.close()
    assert not any(map(processes.is_alive, pids))
    assert not any(folder.exists() for folder in folders)
