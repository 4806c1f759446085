"""The pytest plugin in a project of its own: each layout is a test, and a seeded bug is found."""

import pytest
import torch._dynamo  # noqa: F401 - pytester unloads what a run has loaded, and torch cannot be loaded twice

pytest_plugins = ["pytester"]

MODELS = """
import torch

def small():
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))

def huge():  # 40 GB: never allocated
    return torch.nn.Linear(100_000, 100_000)
"""
INI = """
[pytest]
megabucket_models = models:small models:huge
megabucket_dp_sizes = 1 8
megabucket_bucket_sizes = 1 default
"""


@pytest.fixture
def project(pytester):
    pytester.makepyfile(models=MODELS)
    pytester.makeconftest('pytest_plugins = ["megabucket.testing.pytest_plugin"]')
    pytester.syspathinsert()
    return pytester


def test_every_layout_of_the_grid_is_a_test(project):
    project.makeini(INI)
    project.makepyfile("""
        def test_first_bucket_holds_a_parameter(megabucket_layout):
            assert megabucket_layout.buffers[0].buckets[0].params
    """)

    result = project.runpytest("-v")

    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["*models:huge-8-default*PASSED*"])


def test_experts_and_shared_embeddings_are_laid_out_as_such(project):
    project.makepyfile(
        marked="""
        import torch

        def moe():
            layers = {"embedding": torch.nn.Embedding(8, 4), "mix": torch.nn.Linear(4, 4), "expert": torch.nn.Linear(4, 4)}
            model = torch.nn.ModuleDict(layers)
            model.embedding.weight.shared_embedding = True
            for param in model.expert.parameters():
                param.allreduce = False
            return model
    """
    )
    project.makeini("""
        [pytest]
        megabucket_models = marked:moe
        megabucket_dp_sizes = 8
        megabucket_bucket_sizes = default
        megabucket_group_sizes = expert=2
    """)
    project.makepyfile("""
        def test_groups(megabucket_layout):
            dense, expert = megabucket_layout.buffers
            assert (dense.key.group, dense.num_shards) == ("dense", 8)
            assert (expert.key.group, expert.num_shards) == ("expert", 2)
            assert [bucket.params for bucket in dense.buckets] == [("mix.bias", "mix.weight"), ("embedding.weight",)]
            assert sorted(expert.params) == ["expert.bias", "expert.weight"]
    """)

    project.runpytest().assert_outcomes(passed=1)


def test_a_promise_that_some_layout_breaks_is_found(project):
    project.makeini(INI)
    project.makepyfile("""
        def test_nothing_is_padded(megabucket_layout):
            assert all(buffer.padding_fraction == 0 for buffer in megabucket_layout.buffers)
    """)

    result = project.runpytest()

    result.assert_outcomes(failed=8)  # not even the large one: its bias ends in the middle of 128 elements


@pytest.mark.parametrize(
    ("ini", "text"),
    [
        ("[pytest]\n", "*set megabucket_models in pytest's configuration*"),
        ("[pytest]\nmegabucket_models = models\n", "*factory='models' is not module:callable*"),
    ],
    ids=["no model", "no function"],
)
def test_what_is_missing_is_named(project, ini, text):
    project.makeini(ini)
    project.makepyfile("def test_layout(megabucket_layout): pass")

    result = project.runpytest()

    result.stdout.fnmatch_lines([text])
    assert result.ret != 0
