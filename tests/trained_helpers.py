"""What the tests of trained networks share: a run folder without the training."""

from recipes_helpers import trainee_of

from pwlu.recipes.run_folder import RunFolder


def folder_of(task, path):
    """A run of this task that ended before its first step; what would have been trained."""
    path.mkdir()
    folder, trainee = RunFolder(path), trainee_of(task)
    folder.write_json("config.json", task.settings.as_dict())
    folder.write_tensors("model.pt", trainee.measured.state_dict())
    return trainee
