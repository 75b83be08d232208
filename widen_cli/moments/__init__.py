"""What a training run keeps beside a model, grown with it: Adam's moments, and which parameters are new.

The moments are sums of gradients (`exp_avg`) and of their squares (`exp_avg_sq`), so they grow by the factors of gradients
(`plan.gradients`) and by the squares of these: after as many steps from the same start a wide model's own would be these.
"""
