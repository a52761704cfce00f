"""Learning: loss, schedule, the loop and what goes around it, checkpoints, several processes.

`schedule`, `label_smoothing`, `builders`, `checkpoints`, `loop`, `loader`, `run_state`,
`callbacks`, `distributed`
"""
