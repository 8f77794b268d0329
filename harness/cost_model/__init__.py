"""Predictions of what a run will need, from its configuration alone: no device, no process, no torch.

    config, layout, the engine's widths             harness.config, harness.layout, harness.engines
          |
          +--> prediction.py ---- one Prediction for runs and for plans, worked out as it is read
                  |
        memory ---+--- memory.py <- rank_memory.py                      the fullest rank, its worst moment
                  |        |            |
                  |        |            +-- step.py <- stage_activations.py <- activations.py, layer_backward.py
                  |        |            |                                                      a pass as a tape.py
                  |        |            +-- sharding.py <- fully_shard.py, data_parallel_buckets.py,
                  |        |            |                  deepspeed_zero.py <- deepspeed_buckets.py
                  |        |            |                            <- deepspeed_stage_3.py
                  |        |                                                                what a library allocates
                  |        +-- stack_memory.py <- stack_sharding.py         other implementations, policies as data
                  |        |
                  |    fits.py                                           whether a plan fits
                  |
        bytes  ---+--- communication.py                          by axis and operation, as the papers state them
        work   ---+--- flops.py, pipeline.py                     operations of a step; bubble and passes in flight
        time   ---+--- timing/step_time.py <- stage_time.py <- layer_time.py <- kernels.py, collectives.py
                                                                 seconds by the cluster's figures, in closed form

What a decoder layer multiplies, keeps and sends is one table of operators (harness.config.model).
"""
