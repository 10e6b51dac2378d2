# SPDX-License-Identifier: Apache-2.0
"""Names of the arguments of other libraries' preconditioners, as their sources have them."""

# github.com/gpauloski/kfac-pytorch, kfac/preconditioner.py at dae45024: KFACPreconditioner, behind the model.
KAISA = """factor_update_steps inv_update_steps damping factor_decay kl_clip lr accumulation_steps allreduce_bucket_cap_mb
    assignment_strategy colocate_factors compute_method compute_eigenvalue_outer_product grad_worker_fraction symmetry_aware
    grad_scaler factor_dtype inv_dtype skip_layers update_factors_in_hook loglevel""".split()
# github.com/Mohammad-Mozaffari/mkor, build/lib/mkor/mkor.py at 5aa4e0a5: MKOR, behind the model, without its optimizer's.
MKOR = """stat_decay inv_freq stabilization_factor measure_time backend half_precision grad_accum_steps sgd_layers optimizer
    grad_scale clipping_value warmup_steps""".split()
# PyPI's distributed-kron 2.0.0: kron. package_parity_test.py holds it to the package.
DISTRIBUTED_KRON = """learning_rate b1 weight_decay weight_decay_mask preconditioner_update_probability max_size_triangular
    min_ndim_triangular memory_save_mode preconditioner_lr preconditioner_init_scale mu_dtype precond_dtype
    precond_update_precision precond_grads_precision scanned_layers lax_map_scanned_layers lax_map_batch_size merge_small_dims
    target_merged_dim_size partition_grads_into_blocks block_size params_partition_specs preconditioner_partition_spec""".split()
