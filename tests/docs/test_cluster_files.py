"""``examples/cluster`` and its page: the shell is sound, options are known, the manifest is what Kubernetes takes."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_commands import read_by
from torch.distributed.run import get_args_parser

from examples.bytegpt.config import load_demo_config
from megabucket.cli.main import app as megabucket_app

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
WITH_PYTHON = os.environ | {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
PAGE = (ROOT / "docs/more-than-one-machine.md").read_text()
SCRIPTS = sorted([*CLUSTER.glob("*.sh"), *CLUSTER.glob("*.sbatch")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_a_script(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_script(script):
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")

    # SC1091: the environment of the reader cannot be read here.
    done = subprocess.run([shellcheck, "--shell=bash", "--exclude=SC1091", script], capture_output=True, text=True, check=False)

    assert done.stdout == ""


@pytest.fixture
def manifest():
    return {one["kind"]: one for one in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())}


def test_kubernetes_takes_the_manifest(manifest):
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

    for one in manifest.values():
        schemas.validate(one, schemas.latest_version(), strict=True)
    manifest["Job"]["spec"]["completionmode"] = "Indexed"
    with pytest.raises(schemas.ValidationError):  # it is a schema that refuses something
        schemas.validate(manifest["Job"], schemas.latest_version(), strict=True)


def check_demo(words: list[str]) -> None:
    """Read the demo's part of a command, with whatever the shell would fill in."""
    assert words[:2] == ["-m", "examples.bytegpt"]
    overrides = [word for word in words[2:] if "=" in word]
    assert [word for word in words[2:] if word not in overrides] == ["--resume", "auto"]
    load_demo_config(ROOT / "configs/bytegpt.yaml", [*overrides, "checkpoint.resume=auto"])


def test_the_parts_of_the_manifest_agree(manifest):
    service, job = manifest["Service"], manifest["Job"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    _, command = container["args"][0].split("torchrun ", 1)
    launch = get_args_parser().parse_args(shlex.split(command.replace("$((JOB_COMPLETION_INDEX == 0))", "1")))
    host, port = launch.rdzv_endpoint.split(":")

    assert int(launch.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"  # pod 0, as the service names it
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert "POD_IP" in {variable["name"] for variable in container["env"]}
    assert launch.module
    check_demo(["-m", launch.training_script, *launch.training_script_args])


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_tasks.sbatch"])
def test_a_batch_script_runs_the_demo_with_options_that_it_takes(name):
    script = (CLUSTER / name).read_text()
    (command,) = re.findall(r"-m examples\.bytegpt .*(?:\n.*--resume auto.*)?", script)

    words = shlex.split(re.sub(r""" '$|"\$@"'?|\s-(?=\s)|\\\n""", " ", command.replace("' -", " ")))

    check_demo([word for word in words if word])


def test_torchrun_is_given_options_that_it_takes():
    script = (CLUSTER / "torchrun.sh").read_text()
    command = script.split("exec torchrun \\\n", 1)[1].replace("\\\n", " ")

    known = {option for action in get_args_parser()._actions for option in action.option_strings}

    assert set(re.findall(r"--[\w-]+", command)) <= known


COMMANDS = [
    line.split("torchrun.sh ")[1].rstrip(" &") for line in PAGE.splitlines() if "bash examples/cluster/torchrun.sh " in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_one_that_the_script_and_its_program_take(command):
    head, num_hosts, num_local_ranks, dash_m, module, *arguments = shlex.split(command)

    assert (head, int(num_hosts), int(num_local_ranks), dash_m) == ("10.0.0.1", 2, 2, "-m")
    if module == "megabucket":
        read_by(megabucket_app, arguments)
    else:
        assert module == "examples.bytegpt"
        load_demo_config(ROOT / "configs/bytegpt.yaml", [word for word in arguments if "=" in word])
        assert [word for word in arguments if "=" not in word] in ([], ["--resume", "auto"])


def test_the_page_shows_the_command_of_the_script():
    shown = re.search(r"^torchrun .*(?:\n .*)+", PAGE, re.MULTILINE)[0]
    script = (CLUSTER / "torchrun.sh").read_text().split("exec torchrun", 1)[1]

    launch = get_args_parser().parse_args(shlex.split(shown.replace("\\\n", " "))[1:])

    assert re.findall(r"--[\w-]+", shown.split(" -m ")[0]) == re.findall(r"--[\w-]+", script)
    assert (launch.rdzv_endpoint, launch.local_addr, launch.rdzv_conf) == ("10.0.0.1:29400", "10.0.0.1", "is_host=1")


def test_the_python_of_the_page_can_be_read():
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

    for block in blocks:
        for line in compile(block, "page", "exec", ast.PyCF_ONLY_AST).body:
            if isinstance(line, ast.ImportFrom):
                assert all(hasattr(importlib.import_module(line.module), name.name) for name in line.names)
    assert len(blocks) == 2


@pytest.mark.dist
@pytest.mark.nightly
def test_two_ranks_of_one_host_train_and_go_on(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")

    def run(steps: int) -> str:
        options = [f"train.steps={steps}", "train.eval_batches=1", "optimizer.final_lr_fraction=1.0"]
        saving = [f"checkpoint.folder={tmp_path / 'run'}", f"train.log_path={tmp_path / 'log.jsonl'}", "--resume", "auto"]
        head = ["bash", CLUSTER / "torchrun.sh", "127.0.0.1", "1", "2"]
        done = subprocess.run(
            [*head, "-m", "examples.bytegpt", *options, *saving],
            cwd=ROOT,
            env=WITH_PYTHON,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    first, second = run(2), run(4)

    assert "2 ranks at 127.0.0.1 (lo), head 127.0.0.1 (here)" in first
    assert "going on from step 2 of 4" in second
