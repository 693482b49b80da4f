"""The vertex cut against a brute force, and against networkx on larger graphs."""

import itertools
import random

import networkx as nx
import pytest

from opforge.runtime.partition.flow import INFINITE, min_vertex_cut

Graph = tuple[list[list[int]], list[int], list[bool], list[bool]]


def random_graph(seed: int, size: int) -> Graph:
    """Acyclic, numbered in topological order; some vertices cannot be cut."""
    rng = random.Random(seed)
    inputs = [sorted(rng.sample(range(v), min(v, rng.randint(0, 3)))) for v in range(size)]
    capacity = [INFINITE if rng.random() < 0.1 else rng.randint(1, 9) for _ in range(size)]
    return inputs, capacity, [rng.random() < 0.25 for _ in range(size)], [rng.random() < 0.25 for _ in range(size)]


def separates(graph: Graph, cut: set[int]) -> bool:
    inputs, _, source, sink = graph
    reached = [False] * len(inputs)
    for v, operands in enumerate(inputs):
        reached[v] = v not in cut and (source[v] or any(reached[u] for u in operands))
    return not any(r and s for r, s in zip(reached, sink, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_least_of_all_cuts(seed: int) -> None:
    graph = random_graph(seed, 9)
    capacity = graph[1]
    cut = min_vertex_cut(*graph)
    assert separates(graph, set(cut))
    every = (set(c) for n in range(10) for c in itertools.combinations(range(9), n))
    best = min(sum(capacity[v] for v in c) for c in every if separates(graph, c))
    cost = sum(capacity[v] for v in cut)
    assert cost == best if best < INFINITE else cost >= INFINITE


@pytest.mark.parametrize("seed", range(5))
def test_as_networkx(seed: int) -> None:
    graph = random_graph(seed, 300)
    inputs, capacity, source, sink = graph
    net = nx.DiGraph()
    net.add_nodes_from(("source", "sink"))
    for v, operands in enumerate(inputs):
        net.add_edge((v, 0), (v, 1), capacity=capacity[v])
        for u in operands:
            net.add_edge((u, 1), (v, 0))
        if source[v]:
            net.add_edge("source", (v, 0))
        if sink[v]:
            net.add_edge((v, 1), "sink")
    for v in range(len(capacity)):
        capacity[v] = min(capacity[v], 1000)
        net[(v, 0)][(v, 1)]["capacity"] = capacity[v]
    cut = min_vertex_cut(*graph)
    assert separates(graph, set(cut))
    assert sum(capacity[v] for v in cut) == nx.minimum_cut_value(net, "source", "sink")


def test_the_cut_nearest_to_the_sink_is_taken() -> None:
    assert min_vertex_cut([[], [0], [1]], [5, 5, 5], [True, False, False], [False, False, True]) == [2]
    assert min_vertex_cut([[], [0], [1]], [5, 4, 5], [True, False, False], [False, False, True]) == [1]


def test_nothing_to_cut() -> None:
    assert min_vertex_cut([], [], [], []) == []
    assert min_vertex_cut([[], [0]], [1, 1], [False, False], [False, True]) == []


def test_a_source_that_is_a_sink() -> None:
    assert min_vertex_cut([[]], [7], [True], [True]) == [0]
