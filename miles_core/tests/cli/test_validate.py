"""`miles validate`, `miles schema` and `miles init` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from miles_core.cli import main
from miles_core.kinds.reward import Scored
from miles_core.registry import load_target
from miles_core.testing.tiny import make_tiny_model, write_tiny_tokenizer
from miles_core.types import Prompt

BAD = "name: x\nmodel: absent\nschedule: {steps: 3, grup_size: 4}\n"


def test_every_problem_is_printed_and_the_exit_code_is_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BAD)
    result = CliRunner().invoke(main, ["validate", str(tmp_path / "run.yaml"), "--set", "seed=-1"])
    assert result.exit_code == 2
    assert "run.yaml:2" in result.stdout
    assert "Did you mean `group_size`?" in result.stdout
    assert "--set #1" in result.stdout
    assert result.stdout.strip().endswith("nothing was started.")


def test_json_is_for_machines(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BAD)
    result = CliRunner().invoke(main, ["validate", str(tmp_path / "run.yaml"), "--json"])
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert not report["ok"]
    lines = {problem["path"]: problem["line"] for problem in report["problems"]}
    assert (lines["model.path"], lines["schedule.grup_size"]) == (2, 3)


def test_a_missing_file_is_a_problem_too(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["validate", str(tmp_path / "absent.yaml")])
    assert result.exit_code == 2
    assert "miles init" in result.stdout


def test_the_schema_is_json() -> None:
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["$schema"].startswith("http://json-schema.org/draft-07")


def test_init_writes_files_that_lack_only_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(main, ["init", "my run"])
    assert made.exit_code == 0, made.output
    assert sorted(path.name for path in (tmp_path / "my run").iterdir()) == ["reward.py", "run.yaml", "train.jsonl"]
    result = CliRunner().invoke(main, ["validate", "my run/run.yaml", "--json"])
    problems = json.loads(result.stdout)["problems"]
    assert {problem["path"] for problem in problems} <= {"model.path", "backend", "engine", "transport"}
    score = load_target(f"{tmp_path}/my run/reward.py:score")
    answers = {"5": 1.0, "2 + 3 = 5": 1.0, "2 + 3 = 5, and 4": 0.0, "15": 0.0, "five": 0.0}
    first = json.loads((tmp_path / "my run/train.jsonl").read_text().splitlines()[0])
    row = Prompt(id="q", messages=(), label=first["label"])
    for answer, value in answers.items():
        assert score(Scored(prompt=row, messages=(), response=answer, truncated=False, metadata={})) == value, answer
    again = CliRunner().invoke(main, ["init", "my run"])
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_no_heavy_library_is_imported(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BAD)
    code = (
        "import sys\nfrom miles_core.cli import main\n"
        "for command in (['validate', 'run.yaml'], ['schema'], ['init', 'new']):\n"
        "    try:\n        main(command)\n    except SystemExit:\n        pass\n"
        "    found = {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    assert not found, (command, found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_init_names_a_model_that_is_there_and_the_run_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    write_tiny_tokenizer(model)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["init"]).exit_code == 0
    result = CliRunner().invoke(main, ["validate", "run.yaml"])
    assert (result.exit_code, result.stdout) == (0, "run.yaml: no problems.\n")
    model.rename(tmp_path / "elsewhere")
    made = CliRunner().invoke(main, ["init", "mine", "--model", "elsewhere"])
    then = made.stdout.splitlines()[-1].removeprefix("then: miles ")
    assert CliRunner().invoke(main, then.split()).stdout == "mine/run.yaml: no problems.\n"
    header = Path("mine/run.yaml").read_text().splitlines()[1:4]
    named = [line.removeprefix("#   miles ").partition("  ")[0] for line in header]
    assert named == [then, "train mine/run.yaml --dry-run", "train mine/run.yaml"]
    refused = CliRunner().invoke(main, ["init", "other", "--model", "org/name"])
    assert refused.exit_code == 2
    assert "hf download org/name --local-dir models/name" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_a_table_of_problems_keeps_its_columns_below_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BAD)
    result = CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml"), "--dry-run"])
    assert result.exit_code == 2
    first, *table = result.stderr.splitlines()
    assert first == "error: the run-file does not describe a run"
    assert "\n".join(table) + "\n" == CliRunner().invoke(main, ["validate", str(tmp_path / "run.yaml")]).stdout


def test_a_run_for_a_gpu_can_be_looked_at_without_one_but_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model(tmp_path / "model")
    for name, count in (("train", 2), ("heldout", 6)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(count)))
    (tmp_path / "reward.py").write_text("def score(scored): ...\n")
    (tmp_path / "run.yaml").write_text(
        "name: x\nmodel: model\ndata: {train: train.jsonl, eval: heldout.jsonl}\nrewards: ['reward.py:score']\n"
        "schedule: {steps: 1}\neval: {every_steps: 1}\nplacement: {device: cuda}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("miles_core.driver.first_look.count_devices", lambda: 0)
    monkeypatch.setattr("miles_core.machine.count_devices", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    looked = CliRunner().invoke(main, ["validate", "run.yaml"])
    assert (looked.exit_code, looked.stdout) == (0, "run.yaml: no problems.\n")
    assert "warning: placement.device is cuda, and no device file" in looked.stderr
    planned = CliRunner().invoke(main, ["train", "run.yaml", "--dry-run"])
    assert planned.exit_code == 0
    assert "6 trajectories each" in planned.stdout
    started = CliRunner().invoke(main, ["train", "run.yaml"])
    assert (started.exit_code, "CUDA is not available" in started.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()
