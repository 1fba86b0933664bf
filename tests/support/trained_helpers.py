"""What the tests of trained networks share: a run folder without the training."""

from lab_helpers import trainer_of

from pwlu.lab.runs.run_folder import RunFolder


def folder_of(task, path):
    """A run of this task that ended before its first step; what would have been trained."""
    path.mkdir()
    folder, trainer = RunFolder(path), trainer_of(task)
    folder.write_json("config.json", task.settings.as_dict())
    folder.write("model.safetensors", trainer.serialised())
    task.network_info({site.name: site.was for site in trainer.report.converted}).write(folder)
    return trainer
