# SPDX-License-Identifier: Apache-2.0
"""Names of the arguments of other libraries' preconditioners, as their sources have them."""

# github.com/gpauloski/kfac-pytorch, kfac/preconditioner.py at dae45024: KFACPreconditioner, behind the model.
KAISA = """factor_update_steps inv_update_steps damping factor_decay kl_clip lr accumulation_steps allreduce_bucket_cap_mb
    assignment_strategy colocate_factors compute_method compute_eigenvalue_outer_product grad_worker_fraction symmetry_aware
    grad_scaler factor_dtype inv_dtype skip_layers update_factors_in_hook loglevel""".split()
# github.com/Mohammad-Mozaffari/mkor, build/lib/mkor/mkor.py at 5aa4e0a5: MKOR, behind the model, without its optimizer's.
MKOR = """stat_decay inv_freq stabilization_factor measure_time backend half_precision grad_accum_steps sgd_layers optimizer
    grad_scale clipping_value warmup_steps""".split()
# PyPI's distributed-kron 2.0.0: kron.
DISTRIBUTED_KRON = """learning_rate b1 weight_decay weight_decay_mask preconditioner_update_probability max_size_triangular
    min_ndim_triangular memory_save_mode preconditioner_lr preconditioner_init_scale mu_dtype precond_dtype
    precond_update_precision precond_grads_precision scanned_layers lax_map_scanned_layers lax_map_batch_size merge_small_dims
    target_merged_dim_size partition_grads_into_blocks block_size params_partition_specs preconditioner_partition_spec""".split()
# torch.optim.Muon of torch 2.15, behind the parameters, as those below.
MUON = "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn".split()
# github.com/nikhilvyas/SOAP, soap.py at a1e5535: SOAP.
SOAP = """lr betas shampoo_beta eps weight_decay precondition_frequency max_precond_dim merge_dims precondition_1d normalize_grads
    data_format correct_bias""".split()
# PyPI's heavyball 3.2.1: SOAP; and what ForeachSOAP of earlier versions has besides.
HEAVYBALL_SOAP = """lr betas shampoo_beta eps weight_decay cautious_weight_decay precondition_frequency max_precond_dim merge_dims
    precondition_1d warmup_steps split multi_tensor mars caution mars_gamma palm precond_scheduler beta2_scale use_precond_schedule
    gradient_clipping update_clipping storage_dtype precond_grad_accum compile_step promote ecc param_ecc orig_shapes
    normalize_grads correct_bias foreach stochastic_schedule""".split()
# github.com/facebookresearch/optimizers at f606606: DistributedShampoo.
DISTRIBUTED_SHAMPOO = """lr betas beta3 epsilon weight_decay weight_decay_type max_preconditioner_dim precondition_frequency
    start_preconditioning_step use_bias_correction iterate_averaging_config grafting_config use_pin_memory shampoo_pt2_compile_config
    distributed_config preconditioner_config shampoo_runtime_config concurrency_config""".split()
# PyPI's kron-torch 0.3.3: Kron.
KRON_TORCH = """lr b1 weight_decay preconditioner_update_probability max_size_triangular min_ndim_triangular memory_save_mode
    momentum_into_precond_update precond_lr precond_init_scale merge_dims mu_dtype precond_dtype""".split()
