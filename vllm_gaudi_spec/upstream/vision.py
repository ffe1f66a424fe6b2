"""What image encoders compute on the host.

Breaks when the encoder takes positions in another form. The import needs torchvision, which other models do without.
"""

from vllm.model_executor.models.pixtral import position_ids_in_meshgrid as position_ids_in_meshgrid
