import { Page } from './parts.js'; import { html } from './ui.js'; export const Checks = () => html`<${Page} title='Checks'><//>`; export const Journal = () => html`<${Page} title='Journal'><//>`
