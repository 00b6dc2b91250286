"""What a training loop needs beside a method: data, checkpoints, the trainer, batch normalisation."""
