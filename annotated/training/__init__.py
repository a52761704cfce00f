"""Training: loss, schedule, the loop and its callbacks, checkpoints, several processes.

`schedule`, `label_smoothing`, `builders`, `checkpoints`, `loop`, `loader`, `run_state`,
`callbacks`, `distributed`
"""
