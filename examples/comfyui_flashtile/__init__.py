"""A custom node of ComfyUI: copy this folder into its custom_nodes/ and put "Flashtile Attention" (advanced/model)
behind the loader of a model. Needs flashtile in ComfyUI's environment."""

from flashtile.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, register

register()

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
