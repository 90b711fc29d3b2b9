"""The style sheet of all panels. Colours come from JupyterLab's or VS Code's theme, or from the surrounding text."""

from __future__ import annotations

# Signal colours are mixed with the text colour: darker on a light page and lighter on a dark one.
PANEL_STYLE = """
.graftlab-panel {
  --gl-ink: var(--jp-ui-font-color1, var(--vscode-foreground, currentColor));
  --gl-pale: color-mix(in srgb, currentColor 75%, transparent);
  --gl-faint: var(--jp-ui-font-color2, var(--vscode-descriptionForeground, var(--gl-pale)));
  --gl-rule: var(--jp-border-color1, var(--vscode-widget-border, color-mix(in srgb, currentColor 30%, transparent)));
  --gl-fill: color-mix(in srgb, var(--gl-ink) 8%, transparent);
  --gl-bad: color-mix(in srgb, var(--jp-error-color1, var(--vscode-errorForeground, #e5484d)) 85%, var(--gl-ink));
  --gl-good: color-mix(in srgb, var(--jp-success-color1, #2f9e44) 70%, var(--gl-ink));
  --gl-warn: color-mix(in srgb, var(--jp-warn-color1, #e8890c) 60%, var(--gl-ink));
  --gl-accent: var(--jp-brand-color1, var(--vscode-focusBorder, #1976d2));
  --gl-code: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  max-width: 1100px; overflow: visible;
}
.graftlab-panel .widget-box, .graftlab-panel .jupyter-widget-box { overflow: visible }
.graftlab-panel .widget-html-content, .graftlab-panel .jupyter-widget-html-content {
  font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; color: var(--gl-ink); height: auto;
}
.graftlab-panel .quiet { color: var(--gl-faint) }
.graftlab-panel .bad { color: var(--gl-bad) }
.graftlab-panel .good, .graftlab-panel .everywhere b { color: var(--gl-good) }
.graftlab-panel .overtaken, .graftlab-panel .unapplied { color: var(--gl-warn) }
.graftlab-panel .graftlab-message .bad { white-space: pre-wrap; overflow-wrap: anywhere }
.graftlab-panel .graftlab-message .lines { font-family: var(--gl-code); font-size: 12px }
.graftlab-panel .graftlab-fold { margin: 6px 2px }
.graftlab-panel .graftlab-fold > .graftlab-fold-button {
  background: none; box-shadow: none; padding: 0 4px; text-align: left; color: var(--gl-ink);
}
.graftlab-panel .graftlab-fold > .graftlab-fold-button:hover { background: var(--gl-fill) }
.graftlab-panel .graftlab-fold > .widget-box { max-height: 320px; overflow-y: auto; padding: 4px 8px }
.graftlab-panel button:focus-visible, .graftlab-panel select:focus-visible, .graftlab-panel input:focus-visible,
.graftlab-panel summary:focus-visible, .graftlab-panel .graftlab-scrolls:focus-visible {
  outline: 2px solid var(--gl-accent); outline-offset: 1px;
}
.graftlab-panel .graftlab-scrolls { max-height: 380px; overflow: auto; border: 1px solid var(--gl-rule) }
.graftlab-panel .spinner {
  display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.5em; vertical-align: -0.1em;
  border: 2px solid var(--gl-rule); border-top-color: var(--gl-accent);
  border-radius: 50%; animation: graftlab-turn 0.9s linear infinite;
}
.graftlab-panel.jupyter-widgets-disconnected::before {
  content: "Not live: the kernel was restarted or has ended. Run the cell again.";
  font: inherit; font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; color: var(--gl-bad); padding: 0 0 4px;
}
.graftlab-panel.jupyter-widgets-disconnected > * { opacity: 0.55; pointer-events: none }
.graftlab-panel .jupyter-widgets-disconnected::before { content: none; padding: 0 }
@keyframes graftlab-turn { to { transform: rotate(360deg) } }
@media (prefers-reduced-motion: reduce) { .graftlab-panel .spinner { animation: none } }
"""
