"""opforge: a torch.compile backend generated from YAML specs."""
